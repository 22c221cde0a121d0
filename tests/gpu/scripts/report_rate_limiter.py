"""The host waits for an event before each piece, so that not too much is in flight."""
# cause: explicit_sync
# options: --skip 2 --steps 1
# after: T037

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(8):
        with torch.cuda.stream(s1):
            for _ in range(6):
                torch.cumsum(a, 1)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()  # culprit
        with torch.cuda.stream(s2):
            for _ in range(6):
                torch.cumsum(b, 1)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
