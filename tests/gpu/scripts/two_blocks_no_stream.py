"""Two independent blocks on one stream: no streams were asked for, so there is nothing to explain."""
# cause: none
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
for _ in range(5):
    for _ in range(40):
        torch.cumsum(a, 1)
    for _ in range(40):
        torch.cumsum(b, 1)
    tw.step()
