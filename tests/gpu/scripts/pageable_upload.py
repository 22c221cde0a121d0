"""An upload that asks not to block, from memory that is not pinned."""
# cause: pageable_copy
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a = torch.randn(2048, 2048, device="cuda")
host = torch.randn(4096, 4096)
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(6):
        with torch.cuda.stream(s2):
            batch = host.to("cuda", non_blocking=True)  # culprit
        with torch.cuda.stream(s1):
            torch.mm(a, a)
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
