"""A gradient is made on one stream and given to backward() under another, with no wait."""
# cause: missing_wait
# options: --skip 2 --steps 1
# after: T011

import torch

import torchweave as tw

rows = torch.rand(16, 1_500_000, device="cuda", requires_grad=True)
seed = torch.rand(16, 1_500_000, device="cuda")
side = torch.cuda.Stream()
for _ in range(5):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = rows * 2
    for _ in range(12):
        gradient = torch.cumsum(seed, 1)
    with torch.cuda.stream(side):
        y.backward(gradient=gradient)  # culprit
    torch.cuda.current_stream().wait_stream(side)
    gradient.record_stream(side)
    tw.step()
