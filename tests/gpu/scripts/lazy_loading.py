"""The first launch of each kernel loads its module, which holds the host."""
# cause: lazy_load
# options: --range 'first launches'
# env: CUDA_MODULE_LOADING=LAZY

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
torch.cumsum(a, 1)
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for stream in (s1, s2):
    with torch.cuda.stream(stream):
        # memory for both streams, so that loading is all that is left
        kept = [torch.empty(16, 1_500_000, device="cuda", dtype=torch.int64) for _ in range(8)]
        del kept
torch.cuda.synchronize()
with tw.region("first launches"):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s1):
        for _ in range(12):
            x = torch.cumsum(a, 1)
        x.softmax(-1).cumsum(0).erf()  # culprit
    with torch.cuda.stream(s2):
        for _ in range(12):
            y = torch.cumsum(b, 1)
        y.sort(-1).values.logsumexp(0)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
torch.cuda.synchronize()
