"""The wait is asked for inside the stream's own context: the stream waits for itself, and the overlap is a race."""
# cause: missing_wait
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a = torch.rand(16, 1_500_000, device="cuda")
side = torch.cuda.Stream()
for _ in range(5):
    for _ in range(12):
        x = torch.cumsum(a, 1)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.current_stream())  # culprit
        for _ in range(12):
            y = torch.cumsum(x, 1)
    torch.cuda.current_stream().wait_stream(side)
    tw.step()
