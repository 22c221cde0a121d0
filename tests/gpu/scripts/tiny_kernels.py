"""Kernels shorter than the host takes to launch them."""
# cause: launch_bound
# options: --skip 2 --steps 1

import torch

import torchweave as tw

x, y = (torch.zeros(256, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(300):
        with torch.cuda.stream(s1):
            x.add_(1)  # culprit
        with torch.cuda.stream(s2):
            y.add_(1)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
