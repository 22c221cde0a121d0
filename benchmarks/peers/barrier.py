"""Two threads that meet at a barrier before and after every exchange: one computes while the other communicates.

It costs a user the coordinator below (some 60 lines), two lines at every exchange of the module, and a module that may
be changed. As in `two_streams`, the order of collectives is not the same on every rank.
"""

from __future__ import annotations

import threading

import torch

from peers.two_streams import TwoStreams

LINES = 75
LIMIT_S = 60.0


class Barrier(TwoStreams):
    """Lets both threads pass a point only together, until one of them has ended."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.members: set[int] = set()
        self.barrier: threading.Barrier | None = None

    def exchange(self, all_to_all):
        """Return the module's exchange with a point before and after it, in both directions."""

        def run(x, *rest):
            return _Point.apply(all_to_all(_Point.apply(x, self), *rest), self)

        return run

    def point(self) -> None:
        if self.barrier is not None and threading.get_ident() in self.members:
            try:
                self.barrier.wait(LIMIT_S)
            except threading.BrokenBarrierError:
                # the other thread has ended: nobody is there to meet
                self.barrier = None

    def run(self, *, forward, backward):
        self.barrier, self.members = threading.Barrier(2), set()

        def member(call):
            def run():
                self.members.add(threading.get_ident())
                try:
                    return call()
                finally:
                    barrier = self.barrier
                    if barrier is not None:
                        barrier.abort()

            return run

        def late():
            # one segment behind: it computes while the other exchanges
            self.point()
            return forward()

        try:
            return super().run(forward=member(late), backward=member(backward))
        finally:
            self.barrier = None


class _Point(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        barrier.point()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.barrier.point()
        return grad, None
