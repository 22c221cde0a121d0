"""Activations go to pinned memory that is allocated on the fly."""
# cause: pinned_alloc
# accept: blocking_copy
# options: --skip 2 --steps 1
# after: T029

import torch

import torchweave as tw

a = torch.rand(16, 1_500_000, device="cuda")
activations = [torch.randn(1024, 4096, device="cuda") for _ in range(6)]
kept = []
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for activation in activations:
        with torch.cuda.stream(s1):
            for _ in range(3):
                torch.cumsum(a, 1)
        with torch.cuda.stream(s2):
            # other sizes each time, as sequences have: the cache of pinned memory does not help
            host = torch.empty(1024 + 8 * len(kept), 4096, pin_memory=True)  # culprit
            host[:1024].copy_(activation, non_blocking=True)
        kept.append(host)
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
