"""A number is read from the device after each piece of work."""
# cause: host_sync
# accept: explicit_sync
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(12):
        with torch.cuda.stream(s1):
            for _ in range(4):
                y = torch.cumsum(a, 1)
            first = y.sum().item()  # culprit
        with torch.cuda.stream(s2):
            for _ in range(4):
                y = torch.cumsum(b, 1)
            second = y.sum().item()  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
