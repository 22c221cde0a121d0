"""A prefetcher uploads the next batch on a side stream, from memory that is not pinned."""
# cause: pageable_copy
# options: --skip 2 --steps 1
# after: T093

import torch

import torchweave as tw

batches = [torch.randn(4096, 4096) for _ in range(2)]
rows = torch.rand(16, 1_500_000, device="cuda")
side = torch.cuda.Stream()
for _ in range(5):
    batch = None
    for k in range(6):
        with torch.cuda.stream(side):
            following = batches[k % 2].to("cuda", non_blocking=True)  # culprit
        torch.cumsum(rows, 1)
        torch.cuda.current_stream().wait_stream(side)
        following.record_stream(torch.cuda.current_stream())
        batch = following
    tw.step()
