"""Pinned memory is allocated in the loop, which waits for the device."""
# cause: pinned_alloc
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a = torch.rand(16, 1_500_000, device="cuda")
kept = []
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(s1):
            for _ in range(4):
                torch.cumsum(a, 1)
        host = torch.empty(512 * (len(kept) + 5), 4096, pin_memory=True)  # culprit
        kept.append(host)
        with torch.cuda.stream(s2):
            host[:64].to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
