"""A library waits for its stream after every launch."""
# cause: explicit_sync
# options: --skip 2 --steps 1
# after: T083

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))


def launch(rows, stream):
    with torch.cuda.stream(stream):
        result = torch.cumsum(rows, 1)
        stream.synchronize()  # culprit
    return result


s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        launch(a, s1)
        launch(b, s2)
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
