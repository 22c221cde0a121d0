"""All of one side is launched before the other; launching it takes as long as running it."""
# cause: issued_late
# accept: launch_bound
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s1):
        for _ in range(500):
            torch.mm(a, a)  # culprit
    with torch.cuda.stream(s2):
        for _ in range(500):
            torch.mm(b, b)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
