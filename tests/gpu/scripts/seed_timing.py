"""The question: host clocks around launches, on the default stream and under another."""
# cause: timed_without_sync

import time

import torch

side = torch.cuda.Stream()
start = time.time()
a = torch.randn(10000, 10000, device="cuda")
b = torch.randn(10000, 10000, device="cuda")
for _ in range(20):
    c = torch.mm(a, b)
print("calc time", time.time() - start)  # culprit
torch.cuda.synchronize()

start = time.time()
with torch.cuda.stream(side):
    a = torch.randn(10000, 10000, device="cuda")
    b = torch.randn(10000, 10000, device="cuda")
    for _ in range(20):
        c = torch.mm(a, b)
print("stream time", time.time() - start)  # culprit
torch.cuda.synchronize()
