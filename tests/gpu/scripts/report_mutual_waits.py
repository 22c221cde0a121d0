"""Two streams hand each other events after every operation."""
# cause: wide_dependency
# options: --skip 2 --steps 1
# after: T065

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(s1):
            torch.cumsum(a, 1)
            first = s1.record_event()
        with torch.cuda.stream(s2):
            s2.wait_event(first)  # culprit
            torch.cumsum(b, 1)
            second = s2.record_event()
        s1.wait_event(second)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
