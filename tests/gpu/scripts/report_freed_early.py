"""A copy stream still reads a tensor that was freed and whose memory was given out again."""
# cause: missing_wait
# options: --skip 2 --steps 1
# after: T031

import torch

import torchweave as tw

rows = torch.rand(16, 1_500_000, device="cuda")
host = torch.empty(16, 1_500_000, pin_memory=True)
side = torch.cuda.Stream()
for _ in range(5):
    x = torch.cumsum(rows, 1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    del x
    y = torch.cumsum(rows, 1)  # culprit
    torch.cuda.current_stream().wait_stream(side)
    tw.step()
