"""Which work of the device certainly comes after which: happens-before, by vector clocks over the log.

Within a stream everything is ordered. An event hands the recording stream's past to whoever waits for it, a
synchronization hands it to the host, and the host hands all it has waited for to whatever it asks for next.

What torch orders by itself is not in the log, and is taken to be more than it is: within one `backward()` each
operator comes after all before it, and the first after the caller's stream; all collectives share one stream; and what
runs on a stream that `torch.cuda` did not make comes after all and before all, since nobody saw what it waits for.

Source: L. Lamport, "Time, clocks, and the ordering of events" (1978); PyTorch notes, "Stream semantics of backward
passes".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchweave.trace.log import (
    BACKWARD,
    BACKWARD_END,
    COLLECTIVES,
    DRIVER_FREE,
    JOIN,
    OP,
    RECORD,
    SYNC_DEVICE,
    SYNC_EVENT,
    SYNC_STREAM,
    UNSEEN,
    WAIT,
    Log,
)

DEFAULT_STREAM = 0
# which of an event's two values is the stream whose place in the order it has
_STREAM_FIRST, _STREAM_SECOND = frozenset({OP, JOIN, SYNC_STREAM}), frozenset({RECORD, WAIT, BACKWARD, BACKWARD_END})


@dataclass(slots=True)
class Clock:
    """How far each stream's work is known to be over."""

    times: dict[int, int] = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        """Know all that another one knows."""
        for stream, time in other.times.items():
            if time > self.times.get(stream, 0):
                self.times[stream] = time

    def copy(self) -> Clock:
        """Return what is known now."""
        return Clock(dict(self.times))

    def covers(self, stream: int, time: int) -> bool:
        """Return whether a stream's work is known to be over."""
        return self.times.get(stream, 0) >= time


@dataclass(slots=True)
class _Backward:
    """One call of `backward()`: what its first operators come after, and autograd's numbers of what ran within it."""

    begin: Clock = field(default_factory=Clock)
    tasks: set[int] = field(default_factory=set)
    runs: bool = True


class Order:
    """Goes through a log, and knows at each of its rows what comes before.

    Args:
        log: The log.

    Attributes:
        own_waits: The last wait of each stream for itself, row of `Log.events`.
    """

    def __init__(self, log: Log) -> None:
        self.own_waits: dict[int, int] = {}
        self._host = Clock()
        self._streams: dict[int, Clock] = {}
        self._events: dict[int, tuple[Clock, int]] = {}
        self._backwards: dict[int, _Backward] = {}
        self._tasks: dict[int, Clock] = {}
        self._task: Clock | None = None
        self._seen = _seen_streams(log)
        # streams that torch did not make may be blocking ones, which the default stream orders
        self._external = {
            pointer for pointer, flag in zip(log.streams.pointer, log.streams.external, strict=True) if flag
        }

    @property
    def is_backward(self) -> bool:
        """Whether autograd asked for what the present row holds."""
        return self._task is not None

    def clock(self, stream: int) -> Clock:
        """Return what is over when a stream's next work begins, the host's knowledge included."""
        clock = self._streams.setdefault(stream, Clock())
        clock.join(self._host)
        if stream == DEFAULT_STREAM:
            for other in self._external:
                clock.join(self._streams.setdefault(other, Clock()))
        elif stream in self._external:
            clock.join(self._streams.setdefault(DEFAULT_STREAM, Clock()))
        return clock

    def within(self, number: int) -> None:
        """Take the next row for one of a backward: a new one can be that of any call that runs.

        Args:
            number: Autograd's number of the backward.
        """
        if number not in self._tasks:
            clock = self._tasks[number] = Clock()
            running = [backward for backward in self._backwards.values() if backward.runs]
            for backward in running:
                backward.tasks.add(number)
                clock.join(backward.begin)
            if not running:
                self._join_all(clock)
        self._task = self._tasks[number]

    def before(self, kind: int, a: int, b: int) -> None:
        """Begin with a row: what autograd asks for comes after what it has asked for."""
        stream = _stream(kind, a, b)
        if self._task is not None and stream is not None:
            self.clock(stream).join(self._task)
        if kind == OP and a not in self._seen:
            self._join_all(self._host)

    def after(self, kind: int, a: int, b: int) -> None:
        """Be done with a row."""
        stream = _stream(kind, a, b)
        # a collective is no part of a backward: whoever launched it waits for it
        if self._task is not None and stream is not None and stream != COLLECTIVES:
            self._task.join(self.clock(stream))
        if kind == OP and a not in self._seen:
            self._host.join(self.clock(a))
        self._task = None

    def ask(self, row: int, kind: int, a: int, b: int) -> None:
        """Take note of what a row orders."""
        if kind == RECORD:
            self._events[a] = (self.clock(b).copy(), b)
        elif kind == WAIT and a in self._events:
            clock, stream = self._events[a]
            if stream == b:
                self.own_waits[b] = row
            self.clock(b).join(clock)
        elif kind == WAIT and a == UNSEEN:
            self._join_all(self.clock(b))
        elif kind == JOIN:
            self.clock(a).join(self.clock(b))
        elif kind in (BACKWARD, BACKWARD_END):
            self._backward(kind, a, b)
        elif kind == SYNC_EVENT and a in self._events:
            self._host.join(self._events[a][0])
        elif kind == SYNC_STREAM:
            self._host.join(self.clock(a))
        elif kind in (SYNC_DEVICE, DRIVER_FREE):
            self._join_all(self._host)

    def _join_all(self, clock: Clock) -> None:
        """Let something come after all work so far."""
        for other in list(self._streams.values()):
            clock.join(other)

    def _backward(self, kind: int, number: int, stream: int) -> None:
        """Begin or end a backward: its first operators wait for the caller's streams, and these for all of it."""
        if kind == BACKWARD:
            self._backwards.setdefault(number, _Backward()).begin.join(self.clock(stream))
            return
        # one that began before the log can be any
        ended = self._backwards.setdefault(number, _Backward(tasks=set(self._tasks)))
        ended.runs = False
        for task in ended.tasks:
            self.clock(stream).join(self._tasks[task])


def _stream(kind: int, a: int, b: int) -> int | None:
    """Return the stream whose place in the order a row has."""
    return a if kind in _STREAM_FIRST else b if kind in _STREAM_SECOND else None


def _seen_streams(log: Log) -> set[int]:
    """Return the streams that the program made, used or ordered by `torch.cuda`: what they wait for is in the log."""
    events = log.events
    ordered = {b for kind, b in zip(events.kind, events.b, strict=True) if kind in (RECORD, WAIT)}
    return {DEFAULT_STREAM, COLLECTIVES, *ordered, *log.streams.pointer, *log.uses.pointer}
