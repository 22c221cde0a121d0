"""The 33rd stream that is made is the first one again."""
# cause: stream_alias
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
streams = [torch.cuda.Stream() for _ in range(33)]  # culprit
s1, s2 = streams[0], streams[32]
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(40):
        with torch.cuda.stream(s1):
            torch.cumsum(a, 1)
        with torch.cuda.stream(s2):
            torch.cumsum(b, 1)
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
