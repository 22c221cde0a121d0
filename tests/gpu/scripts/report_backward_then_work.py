"""backward() is called under a stream, and the next work on that stream waits for all of it."""
# cause: backward_join
# accept: wide_dependency
# factor: its steps are of two kinds
# options: --skip 4 --steps 1
# after: T009

import torch

import torchweave as tw

x = torch.rand(16, 800_000, device="cuda", requires_grad=True)
rows = torch.rand(16, 800_000, device="cuda")
own, side = torch.cuda.Stream(), torch.cuda.Stream()


def forward():
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        y = x
        for _ in range(10):
            y = torch.cumsum(y, 1) * 1e-6
        loss = y.sum()
    torch.cuda.current_stream().wait_stream(own)
    return loss


loss = forward()
for _ in range(5):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss.backward()  # culprit
        for _ in range(10):
            torch.cumsum(rows, 1)
    torch.cuda.current_stream().wait_stream(side)
    tw.step()
    loss = forward()
    tw.step()
