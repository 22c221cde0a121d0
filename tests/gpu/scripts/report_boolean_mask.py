"""A boolean mask chooses rows: the host has to learn how many."""
# cause: host_sync
# accept: explicit_sync
# options: --skip 2 --steps 1
# after: T023

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
values = torch.randn(4_000_000, device="cuda")
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(8):
        with torch.cuda.stream(s1):
            for _ in range(4):
                torch.cumsum(a, 1)
            chosen = values[values > 0]  # culprit
        with torch.cuda.stream(s2):
            for _ in range(4):
                torch.cumsum(b, 1)
            chosen = values[values < 0]  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
