"""Logs told by hand: what was asked of the device, one thing after another."""

from __future__ import annotations

from torchweave.trace.log import (
    ALLOCATE,
    BACKWARD,
    BACKWARD_END,
    COLLECTIVES,
    DENSE,
    DRIVER_FREE,
    IN_BACKWARD,
    JOIN,
    KEEP,
    OP,
    RECORD,
    SYNC_DEVICE,
    SYNC_EVENT,
    SYNC_STREAM,
    WAIT,
    WRITTEN,
    Log,
)

SIZE = 1000


class Story:
    """Each call is one line of `train.py`, numbered from 1. Memory `m` lies at 1,000,000 * (m + 1).

    Args:
        streams: Those that the program made.
    """

    def __init__(self, streams=(21, 25, 29)) -> None:
        self.log = Log()
        self.time = 0
        for stream in streams:
            self.log.streams.pointer.append(stream)
            self.log.streams.place.append(-1)
            self.log.streams.external.append(0)

    def op(self, stream, *, reads=(), writes=(), name="aten::mul", task=None):
        """An operator; memory is a number, or (number, first byte, last byte) or with a fourth: not dense."""
        log = self.log
        operators = log.operators
        self._within(task)
        operators.name.append(self._name(name))
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

    def wait(self, event, stream, *, task=None):
        self._within(task)
        return self._event(WAIT, event, stream)

    def wait_stream(self, waiter, awaited):
        """What `waiter.wait_stream(awaited)` does: an event of its own."""
        event = 10_000 + len(self.log.events)
        self.record(event, awaited)
        return self.wait(event, waiter)

    def join(self, waiter, awaited, *, task=None):
        """What torch does by itself."""
        self._within(task)
        return self._event(JOIN, waiter, awaited)

    def collective(self, stream, *, task=None, **memory):
        """One that Python waits for: what was asked of a stream before it is over before it begins."""
        self.join(COLLECTIVES, stream, task=task)
        return self.op(COLLECTIVES, name="c10d::allreduce_", task=task, **memory)

    def backward(self, stream, number=0):
        return self._event(BACKWARD, number, stream)

    def backward_end(self, stream, number=0):
        return self._event(BACKWARD_END, number, stream)

    def allocate(self, memory, stream):
        return self._event(ALLOCATE, 1_000_000 * (memory + 1), stream)

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

    def _within(self, task):
        if task is not None:
            self._event(IN_BACKWARD, task)

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
