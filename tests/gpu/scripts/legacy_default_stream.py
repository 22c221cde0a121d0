"""A stream that torch did not make is a blocking one: the default stream orders it."""
# cause: legacy_default_stream
# options: --skip 2 --steps 1

import ctypes

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
handle = ctypes.c_void_p()
torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))
other = torch.cuda.ExternalStream(handle.value)
torch.cuda.synchronize()
for _ in range(5):
    for _ in range(30):
        torch.cumsum(a, 1)  # culprit
        with torch.cuda.stream(other):
            torch.cumsum(b, 1)  # culprit
    tw.step()
