"""The sizes of an exchange are read on the host before each one."""
# cause: host_sync
# accept: explicit_sync, blocking_copy
# options: --skip 2 --steps 1
# after: T075

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
counts = torch.randint(1, 9, (8,), device="cuda")
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(8):
        with torch.cuda.stream(s1):
            for _ in range(4):
                torch.cumsum(a, 1)
            sizes = (counts + 1).tolist()  # culprit
        with torch.cuda.stream(s2):
            for _ in range(4):
                torch.cumsum(b, 1)
            sizes = (counts + 2).tolist()  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
