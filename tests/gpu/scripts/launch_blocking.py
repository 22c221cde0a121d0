"""CUDA_LAUNCH_BLOCKING=1: every launch waits for its kernel."""
# cause: launch_blocking
# options: --skip 2 --steps 1
# env: CUDA_LAUNCH_BLOCKING=1

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(40):
        with torch.cuda.stream(s1):
            torch.cumsum(a, 1)  # culprit
        with torch.cuda.stream(s2):
            torch.cumsum(b, 1)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
