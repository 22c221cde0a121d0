"""Parameters are fetched when their layer is reached, on a stream that waits for all computation."""
# cause: wide_dependency
# options: --skip 2 --steps 1
# after: T035

import torch

import torchweave as tw

layers = [torch.randn(4096, 4096).pin_memory() for _ in range(6)]
x = torch.randn(4096, 4096, device="cuda")
fetched = torch.empty(4096, 4096, device="cuda")
rows = torch.rand(16, 1_500_000, device="cuda")
side = torch.cuda.Stream()
for _ in range(5):
    for layer in layers:
        side.wait_stream(torch.cuda.current_stream())  # culprit
        with torch.cuda.stream(side):
            fetched.copy_(layer, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)  # culprit
        torch.cumsum(rows, 1)
        x + fetched
    tw.step()
