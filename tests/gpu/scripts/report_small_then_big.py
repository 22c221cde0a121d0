"""Ten small operations before a big one, on each stream: the queue runs empty in between."""
# cause: launch_bound
# options: --skip 2 --steps 1
# after: T105

import torch

import torchweave as tw

small = [torch.zeros(64, device="cuda") for _ in range(2)]
big = [torch.rand(16, 4_000, device="cuda") for _ in range(2)]
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(30):
        for stream, numbers, rows in zip((s1, s2), small, big, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(10):
                    numbers.add_(1)  # culprit
                torch.cumsum(rows, 1)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
