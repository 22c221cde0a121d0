"""Upload, computation and download at once: as it should be."""
# cause: none
# options: --skip 2 --steps 1

import torch

import torchweave as tw

a = torch.rand(16, 1_500_000, device="cuda")
up, down = torch.randn(4096, 4096).pin_memory(), torch.empty(4096, 4096, pin_memory=True)
target, source = torch.empty(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
streams = [torch.cuda.Stream() for _ in range(3)]
for _ in range(5):
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(streams[0]):
            torch.cumsum(a, 1)
        with torch.cuda.stream(streams[1]):
            target.copy_(up, non_blocking=True)
        with torch.cuda.stream(streams[2]):
            down.copy_(source, non_blocking=True)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    tw.step()
