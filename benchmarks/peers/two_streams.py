"""Two threads, two streams: the backward where its graph was built, the forward on a side stream.

It costs a user some 15 lines. With several ranks it is wrong: two free threads issue the collectives of one
communicator in another order on every rank. On one rank, where this is measured, nothing is exchanged.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

LINES = 15


class TwoStreams:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        # kept: cuDNN's plans are per thread
        self.thread = ThreadPoolExecutor(1)
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, *, forward, backward):
        own = torch.cuda.current_stream() if self.side else None
        done = self.thread.submit(self._backward, backward, own)
        try:
            if self.side is None:
                return forward()
            self.side.wait_stream(own)
            with torch.cuda.stream(self.side):
                out = forward()
            own.wait_stream(self.side)
            return out
        finally:
            done.result()

    def _backward(self, backward, own):
        if own is not None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(own)
        # on this thread, not on autograd's own
        with torch.autograd.set_multithreading_enabled(False):
            backward()
