"""A pinned batch of another dtype: it is converted on the host, into memory that is not pinned."""
# cause: pageable_copy
# accept: blocking_copy, host_busy
# options: --skip 2 --steps 1
# after: T003

import torch

import torchweave as tw

a = torch.rand(16, 1_500_000, device="cuda")
batch = torch.randn(4096, 4096, dtype=torch.float64).pin_memory()
target = torch.empty(4096, 4096, device="cuda")
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(6):
        with torch.cuda.stream(s1):
            torch.cumsum(a, 1)
        with torch.cuda.stream(s2):
            target.copy_(batch, non_blocking=True)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
