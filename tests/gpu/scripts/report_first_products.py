"""Two products, straight after their streams were made."""
# cause: device_alloc
# accept: sm_full
# options: --range products
# after: T103

import torch

import torchweave as tw

a, b = (torch.randn(2048, 2048, device="cuda") for _ in range(2))
c = a @ b
del c
torch.cuda.synchronize()
torch.cuda.empty_cache()
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
with tw.region("products"):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s1):
        x = a @ a  # culprit
    with torch.cuda.stream(s2):
        y = b @ b  # culprit
torch.cuda.synchronize()
