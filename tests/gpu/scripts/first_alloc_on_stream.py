"""The first work on new streams: their memory pools are empty, so the driver is asked."""
# cause: device_alloc
# options: --range 'first use'

import torch

import torchweave as tw

a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
c = a @ b
torch.randn(8, device="cuda")
torch.cuda.synchronize()
torch.cuda.empty_cache()
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
with tw.region("first use"):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s1):
        x = a @ a  # culprit
        x2 = torch.randn(16384, 8192, device="cuda")  # culprit
    with torch.cuda.stream(s2):
        y = b @ b  # culprit
        y2 = torch.randn(16384, 8192, device="cuda")  # culprit
        y3 = b @ y  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
torch.cuda.synchronize()
