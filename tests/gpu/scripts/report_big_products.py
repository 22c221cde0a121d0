"""Products of 10240 on two streams take as long as one after the other."""
# cause: sm_full
# options: --skip 2 --steps 1
# after: T001

import torch

import torchweave as tw

a, b = (torch.randn(10240, 10240, device="cuda", dtype=torch.bfloat16) for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(8):
        with torch.cuda.stream(s1):
            a @ a  # culprit
        with torch.cuda.stream(s2):
            b @ b  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
