"""Logs told by hand: what was asked of the device, one thing after another."""

from __future__ import annotations

from torchweave.diagnose.races import DENSE, WRITTEN
from torchweave.trace.log import (
    ALLOCATE,
    DRIVER_FREE,
    EVENT_GONE,
    FREE,
    KEEP,
    OP,
    RECORD,
    SYNC_DEVICE,
    SYNC_EVENT,
    SYNC_STREAM,
    WAIT,
    Log,
)

SIZE = 1000


class Story:
    """Each call is one line of `train.py`, numbered from 1. Memory `m` lies at 1,000,000 * (m + 1)."""

    def __init__(self) -> None:
        self.log = Log()
        self.time = 0

    def op(self, stream, *, reads=(), writes=(), name="aten::mul", begin=None):
        """An operator; memory is a number, or (number, first byte, last byte) or with a fourth: not dense."""
        log = self.log
        operators = log.operators
        operators.name.append(self._name(name))
        operators.begin.append(len(log.events) if begin is None else begin)
        operators.first.append(len(log.accesses))
        for memory, flags in [(m, 0) for m in reads] + [(m, WRITTEN) for m in writes]:
            number, low, high, dense = (*memory, True)[:4] if isinstance(memory, tuple) else (memory, 0, SIZE, True)
            base = 1_000_000 * (number + 1)
            log.accesses.base.append(base)
            log.accesses.low.append(base + low)
            log.accesses.high.append(base + high)
            log.accesses.flags.append(flags | (DENSE if dense else 0))
        return self._event(OP, stream, len(operators.name) - 1)

    def record(self, event, stream):
        return self._event(RECORD, event, stream)

    def wait(self, event, stream):
        return self._event(WAIT, event, stream)

    def wait_stream(self, waiter, awaited):
        """What `waiter.wait_stream(awaited)` does: an event that lives no longer."""
        event = 10_000 + len(self.log.events)
        self.record(event, awaited)
        self.wait(event, waiter)
        return self._event(EVENT_GONE, event)

    def allocate(self, memory, stream):
        return self._event(ALLOCATE, 1_000_000 * (memory + 1), stream)

    def free(self, memory):
        return self._event(FREE, 1_000_000 * (memory + 1))

    def keep(self, memory, stream):
        return self._event(KEEP, 1_000_000 * (memory + 1), stream)

    def synchronize(self):
        return self._event(SYNC_DEVICE)

    def synchronize_stream(self, stream):
        return self._event(SYNC_STREAM, stream)

    def synchronize_event(self, event):
        return self._event(SYNC_EVENT, event)

    def driver_free(self):
        return self._event(DRIVER_FREE)

    def _event(self, kind, a=0, b=0):
        events = self.log.events
        self.time += 1_000
        for column, value in zip(
            (events.kind, events.at, events.thread, events.place, events.a, events.b),
            (kind, self.time, 1, len(self.log.places), a, b),
            strict=True,
        ):
            column.append(value)
        self.log.places.append(("train.py", len(self.log.places) + 1, "main"))
        return len(events) - 1

    def _name(self, name):
        if name not in self.log.names:
            self.log.names.append(name)
        return self.log.names.index(name)
