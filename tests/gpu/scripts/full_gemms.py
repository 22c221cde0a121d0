"""Two products that each fill the chip: there is no room for both."""
# cause: sm_full
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a, b = (torch.randn(6144, 6144, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(s1):
            torch.mm(a, a)  # culprit
        with torch.cuda.stream(s2):
            torch.mm(b, b)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
