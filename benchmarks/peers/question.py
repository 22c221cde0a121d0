"""The question's own code: backward under a side stream, then the forward. Autograd launches on the forward's stream.

It costs a user 4 lines, and overlaps nothing.
"""

from __future__ import annotations

import torch

LINES = 4


class Question:
    def __init__(self, device: torch.device) -> None:
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, *, forward, backward):
        if self.side is None:
            backward()
            return forward()
        own = torch.cuda.current_stream()
        self.side.wait_stream(own)
        with torch.cuda.stream(self.side):
            backward()
        out = forward()
        own.wait_stream(self.side)
        return out
