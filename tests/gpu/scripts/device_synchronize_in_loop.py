"""The host waits for the whole device between two pieces of work."""
# cause: explicit_sync
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(s1):
            for _ in range(8):
                torch.cumsum(a, 1)
        torch.cuda.synchronize()  # culprit
        with torch.cuda.stream(s2):
            for _ in range(8):
                torch.cumsum(b, 1)
        torch.cuda.synchronize()  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
