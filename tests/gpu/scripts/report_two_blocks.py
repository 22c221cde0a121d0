"""Two blocks that do not depend on each other, on the default stream."""
# cause: none
# options: --skip 2 --steps 1
# after: T089

import torch
from torch import nn

import torchweave as tw

first, second = (nn.Sequential(nn.Linear(1024, 1024), nn.GELU()).cuda() for _ in range(2))
x = torch.randn(1024, 1024, device="cuda")
for _ in range(5):
    with torch.no_grad():
        for _ in range(50):
            y, z = first(x), second(x)
    tw.step()
