"""The question: the backward of one chunk under another stream than its forward."""
# cause: backward_on_forward_stream
# options: --skip 2 --steps 1

import torch
from torch import nn

import torchweave as tw


def chunk():
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU()))).cuda()


f, g = chunk(), chunk()
x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
side = torch.cuda.Stream()
loss = g(x).square().mean()
for _ in range(5):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss.backward()  # culprit
    loss = f(x).square().mean()
    torch.cuda.current_stream().wait_stream(side)
    tw.step()
