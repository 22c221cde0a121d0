"""CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue."""
# cause: max_connections
# options: --skip 2 --steps 1
# env: CUDA_DEVICE_MAX_CONNECTIONS=1

import torch

import torchweave as tw

matrices = [torch.rand(16, 1_500_000, device="cuda") for _ in range(4)]
streams = [torch.cuda.Stream() for _ in range(4)]
for _ in range(5):
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for rows, stream in zip(matrices, streams, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(12):
                torch.cumsum(rows, 1)  # culprit
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    tw.step()
