"""Memory that two streams use with no order between them: happens-before, by vector clocks over the log.

Within a stream everything is ordered. An event hands the recording stream's past to whoever waits for it, a
synchronization hands it to the host, and the host hands all it has waited for to whatever it asks for next. What one
use of memory has to come after, and is in no such past, is a race.

What is not known makes no race: work before the log began, order between threads of the host (taken to be the order
of asking), and views that interleave without sharing their first byte.

Source: L. Lamport, "Time, clocks, and the ordering of events" (1978); C. Flanagan and S. Freund, "FastTrack" (2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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

WRITTEN, DENSE = 1, 2
DEFAULT_STREAM = 0
# what sends its work to a stream of its own
_COLLECTIVES = ("c10d::", "_c10d_functional::")


@dataclass(frozen=True, slots=True)
class Race:
    """Two uses of one piece of memory with no order between them.

    Attributes:
        first: The earlier use, row of `Log.events`.
        second: The later use.
        first_stream: Its stream.
        second_stream: The later one's.
        first_writes: Whether the earlier one wrote.
        second_writes: Whether the later one wrote.
        freed: The memory was freed and given out again between the two.
        own_wait: The last wait of the later use's stream for itself between the two, row of `Log.events`, or -1.
    """

    first: int
    second: int
    first_stream: int
    second_stream: int
    first_writes: bool
    second_writes: bool
    freed: bool = False
    own_wait: int = -1


@dataclass(slots=True)
class _Clock:
    """How far each stream's work is known to be over."""

    times: dict[int, int] = field(default_factory=dict)

    def join(self, other: _Clock) -> None:
        for stream, time in other.times.items():
            if time > self.times.get(stream, 0):
                self.times[stream] = time

    def copy(self) -> _Clock:
        return _Clock(dict(self.times))

    def covers(self, stream: int, time: int) -> bool:
        return self.times.get(stream, 0) >= time


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of memory."""

    event: int
    stream: int
    time: int
    low: int
    high: int
    flags: int

    @property
    def writes(self) -> bool:
        return bool(self.flags & WRITTEN)

    def meets(self, other: _Use) -> bool:
        """Return whether two uses certainly touch a byte that both touch."""
        if self.low >= other.high or other.low >= self.high:
            return False
        if self.flags & other.flags & DENSE or self.low == other.low:
            return True
        # a view with holes touches its first byte, if nothing else
        return any(one.flags & DENSE and one.low <= two.low < one.high for one, two in ((self, other), (other, self)))

    def hides(self, other: _Use) -> bool:
        """Return whether whatever races with an earlier use, which this one comes after, races with this one too."""
        inside = (self.low, self.high) == (other.low, other.high) and self.flags & DENSE >= other.flags & DENSE
        inside |= bool(self.flags & DENSE) and self.low <= other.low and other.high <= self.high
        return inside and (self.writes or not other.writes)


@dataclass(slots=True)
class _Block:
    """An allocation: whose pool it is from, and what used it."""

    pool: int | None = None
    uses: list[_Use] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)


class _Watcher:
    """Goes through a log once."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.host = _Clock()
        self.streams: dict[int, _Clock] = {}
        self.events: dict[int, tuple[_Clock, int]] = {}
        self.blocks: dict[int, _Block] = {}
        self.ghosts: list[_Use] = []
        self.own_waits: dict[int, int] = {}
        # streams that torch did not make may be blocking ones, which the default stream orders
        self.external = {
            pointer for pointer, flag in zip(log.streams.pointer, log.streams.external, strict=True) if flag
        }

    def races(self) -> Iterator[Race]:
        """Yield the races in the order of their later uses."""
        events = self.log.events
        for row, (kind, a, b) in enumerate(zip(events.kind, events.a, events.b, strict=True)):
            if kind == OP:
                yield from self._operator(row, a, b)
            else:
                self._order(row, kind, a, b)

    def _order(self, row: int, kind: int, a: int, b: int) -> None:
        if kind == RECORD:
            self.events[a] = (self._clock(b).copy(), b)
        elif kind == WAIT and a in self.events:
            clock, stream = self.events[a]
            if stream == b:
                self.own_waits[b] = row
            self._clock(b).join(clock)
        elif kind == EVENT_GONE:
            self.events.pop(a, None)
        elif kind == SYNC_EVENT and a in self.events:
            self.host.join(self.events[a][0])
        elif kind == SYNC_STREAM:
            self.host.join(self._clock(a))
        elif kind in (SYNC_DEVICE, DRIVER_FREE):
            for clock in list(self.streams.values()):
                self.host.join(clock)
        elif kind in (ALLOCATE, FREE, KEEP):
            self._memory(kind, a, b)

    def _memory(self, kind: int, address: int, stream: int) -> None:
        if kind == ALLOCATE:
            self.blocks[address] = _Block(pool=stream)
        elif kind == KEEP:
            self.blocks.setdefault(address, _Block()).kept.add(stream)
        elif block := self.blocks.pop(address, None):
            self._free(block)

    def _free(self, block: _Block) -> None:
        """Keep, of a freed block's uses, those that its next owner will not come after by itself."""
        if block.pool is None:
            return
        pool = self._clock(block.pool)
        self.ghosts += [
            use
            for use in block.uses
            if use.stream not in block.kept and use.stream != block.pool and not pool.covers(use.stream, use.time)
        ]

    def _clock(self, stream: int) -> _Clock:
        """Return what is over when a stream's next work begins, the host's knowledge included."""
        clock = self.streams.setdefault(stream, _Clock())
        clock.join(self.host)
        if stream == DEFAULT_STREAM:
            for other in self.external:
                clock.join(self.streams.setdefault(other, _Clock()))
        elif stream in self.external:
            clock.join(self.streams.setdefault(DEFAULT_STREAM, _Clock()))
        return clock

    def _operator(self, row: int, stream: int, operator: int) -> Iterator[Race]:
        log = self.log
        stream = self._own_stream(row, stream, operator)
        clock = self._clock(stream)
        time = clock.times[stream] = clock.times.get(stream, 0) + 1
        first = log.operators.first
        end = first[operator + 1] if operator + 1 < len(first) else len(log.accesses)
        accesses = log.accesses
        for at in range(first[operator], end):
            use = _Use(row, stream, time, accesses.low[at], accesses.high[at], accesses.flags[at])
            if use.high > use.low:
                yield from self._use(use, accesses.base[at], clock)

    def _own_stream(self, row: int, stream: int, operator: int) -> int:
        """Return the stream that an operator's work went to: a collective's is the one made to wait within it."""
        log = self.log
        if not log.names[log.operators.name[operator]].startswith(_COLLECTIVES):
            return stream
        events = log.events
        for at in range(max(log.operators.begin[operator], 0), row):
            if events.kind[at] == WAIT and events.b[at] != stream:
                return events.b[at]
        return stream

    def _use(self, use: _Use, base: int, clock: _Clock) -> Iterator[Race]:
        block = self.blocks.setdefault(base, _Block())
        for freed, earlier in ((False, block.uses), (True, self.ghosts)):
            for other in earlier:
                conflict = (use.writes or other.writes) and other.event != use.event and use.meets(other)
                if conflict and not clock.covers(other.stream, other.time):
                    yield self._race(other, use, freed)
        block.uses = [other for other in block.uses if not self._over(other, use, clock)]
        block.uses.append(use)
        self.ghosts = [other for other in self.ghosts if not self._over(other, use, clock)]

    @staticmethod
    def _over(other: _Use, use: _Use, clock: _Clock) -> bool:
        """Return whether an earlier use needs no more looking at."""
        return use.hides(other) and clock.covers(other.stream, other.time)

    def _race(self, other: _Use, use: _Use, freed: bool) -> Race:
        own = self.own_waits.get(use.stream, -1)
        return Race(
            other.event, use.event, other.stream, use.stream, other.writes, use.writes, freed,
            own if own > other.event else -1,
        )  # fmt: skip


def races(log: Log) -> tuple[Race, ...]:
    """Return the races of a log, the first of each pair of lines only.

    Args:
        log: The log.
    """
    places = log.events.place
    found: dict[tuple[int, int, bool], Race] = {}
    for race in _Watcher(log).races():
        found.setdefault((places[race.first], places[race.second], race.freed), race)
    return tuple(found.values())
