"""The host stands still for 4 ms at times, and the queues are full: harmless."""
# cause: none
# options: --skip 2 --steps 1

import time

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))


def prepare_batch():
    begin = time.perf_counter()
    n = 0
    while time.perf_counter() - begin < 0.004:
        n += 1


s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(8):
        with torch.cuda.stream(s1):
            for _ in range(12):
                torch.cumsum(a, 1)
        prepare_batch()
        with torch.cuda.stream(s2):
            for _ in range(12):
                torch.cumsum(b, 1)
        prepare_batch()
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
