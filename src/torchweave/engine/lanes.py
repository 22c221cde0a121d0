"""IDEA: a lane is where operations run in order: a CUDA stream, or, without a GPU, the thread itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class Lanes:
    """Side streams of one process, made when first needed and kept: a new stream costs the allocator a new pool."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, str], torch.cuda.Stream] = {}

    def communication(self, device: torch.device, strand: str) -> torch.cuda.Stream:
        """Return the lane on which a strand's `communication()` regions run."""
        return self._get(device, f"communication of {strand}", priority=-1)

    def compute(self, device: torch.device) -> torch.cuda.Stream:
        """Return the second compute lane, for a strand that does not run on the caller's."""
        return self._get(device, "compute", priority=0)

    def _get(self, device: torch.device, use: str, priority: int) -> torch.cuda.Stream:
        index = device.index if device.index is not None else torch.cuda.current_device()
        if (index, use) not in self._streams:
            self._streams[index, use] = torch.cuda.Stream(device=index, priority=priority)
        return self._streams[index, use]


class ForwardLane:
    """The compute lane of a free forward strand: another one than that of the backward which it meets.

    A backward operation runs on the stream of its forward operation, so the backward's lane is known only when it has
    begun. The forward takes the caller's stream, or, where the backward is on that, a side lane which begins after
    everything that the caller queued, and which the caller's stream waits for at the end. Memory of the side lane is
    then used again only behind that wait.

    Args:
        lanes: The process's lanes.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._backward: torch.cuda.Stream | None = None
        self._known = threading.Event()

    def backward_is_here(self) -> None:
        """Take the calling thread's current stream as the backward's lane, the first time."""
        if not self._known.is_set():
            if torch.cuda.is_initialized():
                self._backward = torch.cuda.current_stream()
            self._known.set()

    @contextlib.contextmanager
    def take(self, limit_s: float) -> Iterator[None]:
        """Run the forward on its lane, once the backward's is known."""
        if not torch.cuda.is_initialized():
            yield
            return
        self._known.wait(limit_s)
        own = torch.cuda.current_stream()
        if self._backward is None or self._backward != own:
            yield
            return
        lane = self._lanes.compute(own.device)
        lane.wait_stream(own)
        try:
            with torch.cuda.stream(lane):
                yield
        finally:
            own.wait_stream(lane)
