"""A step is timed by the host's clock, and nothing is waited for."""
# cause: timed_without_sync
# options: --skip 2 --steps 1
# after: T020

import time

import torch

import torchweave as tw

rows = torch.rand(16, 1_500_000, device="cuda")
for _ in range(5):
    begin = time.perf_counter()
    for _ in range(20):
        torch.cumsum(rows, 1)
    elapsed = time.perf_counter() - begin  # culprit
    torch.cuda.synchronize()
    tw.step()
