"""A result is downloaded to memory that is not pinned, which blocks."""
# cause: blocking_copy
# accept: pageable_copy
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a = torch.rand(16, 1_500_000, device="cuda")
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(6):
        with torch.cuda.stream(s1):
            y = torch.cumsum(a, 1)
            first = y[:, :1000].cpu()  # culprit
        with torch.cuda.stream(s2):
            z = torch.cumsum(a, 1)
            second = z[:, :1000].to("cpu")  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
