"""IDEA: how long a pair took, learnt without waiting for it.

On a GPU two events on the caller's stream enclose the pair: the device's time between them is what the pair cost, if
the host is ahead. Where the host is the bottleneck its own time is the longer one. The larger of the two is the cost in
a training step.
"""

from __future__ import annotations

import time

import torch

from torchweave.errors import WaitLimitError


class Events:
    """CUDA events that are used again: making one costs more than recording it."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []

    def record(self) -> torch.cuda.Event:
        """Return an event recorded on the current stream."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def give_back(self, *events: torch.cuda.Event) -> None:
        """Take events that nobody reads any more."""
        self._spare.extend(events)


class Sample:
    """The time of one pair.

    Args:
        events: Where events come from.
    """

    def __init__(self, events: Events) -> None:
        self._source = events
        self._events = [events.record()] if torch.cuda.is_initialized() else []
        self._begun_ns = time.perf_counter_ns()
        self._host_ms = 0.0

    def end(self) -> None:
        """Note that the pair has been issued."""
        self._host_ms = (time.perf_counter_ns() - self._begun_ns) / 1e6
        if torch.cuda.is_initialized():
            self._events.append(self._source.record())

    def ms(self, limit_s: float) -> float:
        """Return what the pair cost, ms; waits for the device only where the pair is not over yet.

        Args:
            limit_s: How long to wait, seconds.

        Raises:
            WaitLimitError: The device did not come to the pair's end.
        """
        if len(self._events) < 2:  # CUDA was first used inside the pair, or not at all
            return self._host_ms
        begun, ended = self._events
        await_event(ended, limit_s)
        device_ms = float(begun.elapsed_time(ended))
        self._source.give_back(*self._events)
        self._events = []
        self._host_ms = max(self._host_ms, device_ms)
        return self._host_ms


def await_event(event: torch.cuda.Event, limit_s: float) -> None:
    """Wait until the device has come to an event, which in most cases it has.

    Args:
        event: One that has been recorded.
        limit_s: How long to wait, seconds.

    Raises:
        WaitLimitError: The device did not come to it.
    """
    give_up = time.monotonic() + limit_s
    while not event.query():
        if time.monotonic() > give_up:
            raise WaitLimitError("weave", "the device to come to the end of a pair", limit_s)
        time.sleep(0.0002)
