"""What a program may say about itself: `step()` and `region(NAME)`. Both do nothing where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Whoever watches the process."""

    def step(self) -> None:
        """Take note that a step has ended."""


class Seat:
    """Room for the one watcher that a process can have.

    The profiler and the functions that are replaced belong to the process, and `step()` has to find who watches from
    anywhere: that is the only reason for state of a module here. Whoever takes the seat gives it back.
    """

    def __init__(self) -> None:
        self.watcher: Watcher | None = None


SEAT = Seat()


def step() -> None:
    """Say that one step of the program has ended; `torchweave why SCRIPT` watches by steps.

    Without it the optimizer's steps are counted. Does nothing where nobody watches.
    """
    if SEAT.watcher is not None:
        SEAT.watcher.step()


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name what runs inside, for `torchweave why --range NAME` and `--between range:A range:B`.

    Args:
        name: The region's name; it shows in any trace of `torch.profiler` too.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        # a program that never imported torch has nothing on a device
        yield
        return
    with torch.profiler.record_function(name):
        yield
