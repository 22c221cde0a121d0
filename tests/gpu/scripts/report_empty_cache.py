"""The cache is emptied in every round: memory is asked for, and given back, over and over."""
# cause: device_alloc
# options: --skip 2 --steps 1
# after: T033

import torch

import torchweave as tw

a = torch.rand(16, 1_500_000, device="cuda")
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(6):
        with torch.cuda.stream(s1):
            x = torch.cumsum(a, 1)  # culprit
        with torch.cuda.stream(s2):
            y = torch.cumsum(a, 1)  # culprit
        del x, y
        torch.cuda.empty_cache()  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
