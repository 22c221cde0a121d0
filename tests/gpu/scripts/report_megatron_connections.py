"""Gradient reduction on a stream of its own, under one connection as tensor parallelism asks for."""
# cause: max_connections
# options: --skip 2 --steps 1
# env: CUDA_DEVICE_MAX_CONNECTIONS=1
# after: T039

import torch

import torchweave as tw

forward, gradients = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
compute, reduce = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    compute.wait_stream(torch.cuda.current_stream())
    reduce.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        with torch.cuda.stream(compute):
            for _ in range(6):
                torch.cumsum(forward, 1)  # culprit
        with torch.cuda.stream(reduce):
            for _ in range(6):
                torch.cumsum(gradients, 1)  # culprit
    torch.cuda.current_stream().wait_stream(compute)
    torch.cuda.current_stream().wait_stream(reduce)
    tw.step()
