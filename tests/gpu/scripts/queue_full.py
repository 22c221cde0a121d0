"""So much is launched on one stream that the host is stuck there, and comes late to the other."""
# cause: launch_queue_full
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a = torch.randn(1024, 1024, device="cuda")
b = torch.rand(16, 1_500_000, device="cuda")
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s1):
        for _ in range(2600):
            torch.mm(a, a)  # culprit
    with torch.cuda.stream(s2):
        for _ in range(55):
            torch.cumsum(b, 1)
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
