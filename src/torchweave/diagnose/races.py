"""Memory that two streams use with no order between them.

What one use of memory has to come after, and is not known to come after (order.py), is a race; so is memory that is
given out again before another stream's use of it is over. What backward and collectives used, torch keeps until then.

What is not known makes no race: work before the log began, order between threads of the host (taken to be the order of
asking), and views that interleave without sharing their first byte.

Source: C. Flanagan and S. Freund, "FastTrack" (2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchweave.diagnose.order import Clock, Order
from torchweave.trace.log import ALLOCATE, COLLECTIVES, DENSE, IN_BACKWARD, KEEP, OP, WRITTEN, Log

# of a use: torch keeps its memory until it is over
_KEPT = 4


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
        self.log, self.order = log, Order(log)
        self.blocks: dict[int, _Block] = {}
        self.ghosts: list[_Use] = []

    def races(self) -> Iterator[Race]:
        """Yield the races in the order of their later uses."""
        events, order = self.log.events, self.order
        for row, (kind, a, b) in enumerate(zip(events.kind, events.a, events.b, strict=True)):
            if kind == IN_BACKWARD:
                order.within(a)
                continue
            order.before(kind, a, b)
            if kind == OP:
                yield from self._operator(row, a, b)
            elif kind == ALLOCATE:
                self._allocate(a, b)
            elif kind == KEEP:
                self.blocks.setdefault(a, _Block()).kept.add(b)
            else:
                order.ask(row, kind, a, b)
            order.after(kind, a, b)

    def _allocate(self, address: int, pool: int) -> None:
        """Begin a new block; of the one that was there, keep the uses that its next owner does not come after."""
        old = self.blocks.pop(address, None)
        self.blocks[address] = _Block(pool=pool)
        if old is None or old.pool is None:
            return
        clock = self.order.clock(old.pool)
        self.ghosts += [
            use
            for use in old.uses
            if not use.flags & _KEPT
            and use.stream not in old.kept
            and use.stream != old.pool
            and not clock.covers(use.stream, use.time)
        ]

    def _operator(self, row: int, stream: int, operator: int) -> Iterator[Race]:
        log, clock = self.log, self.order.clock(stream)
        time = clock.times[stream] = clock.times.get(stream, 0) + 1
        first = log.operators.first
        end = first[operator + 1] if operator + 1 < len(first) else len(log.accesses)
        accesses = log.accesses
        kept = _KEPT if self.order.is_backward or stream == COLLECTIVES else 0
        for at in range(first[operator], end):
            flags = accesses.flags[at] | kept
            use = _Use(row, stream, time, accesses.low[at], accesses.high[at], flags)
            if use.high > use.low:
                yield from self._use(use, accesses.base[at], clock)

    def _use(self, use: _Use, base: int, clock: Clock) -> Iterator[Race]:
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
    def _over(other: _Use, use: _Use, clock: Clock) -> bool:
        """Return whether an earlier use needs no more looking at."""
        return use.hides(other) and clock.covers(other.stream, other.time)

    def _race(self, other: _Use, use: _Use, freed: bool) -> Race:
        own = self.order.own_waits.get(use.stream, -1)
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
