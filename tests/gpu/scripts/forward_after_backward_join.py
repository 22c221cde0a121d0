"""The stream that called backward() waits for all of it, and so does the next forward on that stream."""
# cause: backward_join
# accept: wide_dependency
# factor: its steps are of two kinds
# options: --skip 4 --steps 1

import torch
from torch import nn

import torchweave as tw


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, device="cuda"))

    def forward(self, x):
        for _ in range(10):
            x = torch.cumsum(x * self.w, 1) * 1e-6
        return x


f, g = Scan(), Scan()
x = torch.rand(16, 800_000, device="cuda", requires_grad=True)
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()


def forward_of(chunk):
    s1.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s1):
        loss = chunk(x).square().mean()
    torch.cuda.current_stream().wait_stream(s1)
    return loss


loss = forward_of(g)
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s2):
        loss.backward()  # culprit
        f(x)
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
    # of the next step: a forward inside the watched one would make the two depend on each other
    loss = forward_of(g)
    tw.step()
