"""Every layer makes streams of its own: after 32 they are the first ones again."""
# cause: stream_alias
# options: --skip 2 --steps 1
# after: T097

import torch

import torchweave as tw

rows = torch.rand(16, 1_500_000, device="cuda")


class Layer:
    def __init__(self):
        self.stream = torch.cuda.Stream()  # culprit

    def run(self):
        with torch.cuda.stream(self.stream):
            for _ in range(20):
                torch.cumsum(rows, 1)


layers = [Layer() for _ in range(40)]
for _ in range(5):
    for layer in (layers[2], layers[34]):
        layer.stream.wait_stream(torch.cuda.current_stream())
        layer.run()
    for layer in (layers[2], layers[34]):
        torch.cuda.current_stream().wait_stream(layer.stream)
    tw.step()
