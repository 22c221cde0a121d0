"""IDEA: which stream has seen what of which other, and what the host has not waited for, at one point of the code.

Every launch, record and wait moves one logical clock on. A stream has *seen* another up to a time, as in vector
clocks: a wait hands over all that the awaited one had seen. Where branches meet, a wait in either of them counts, so
that a missing wait is missing on every path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from torchweave.source.values import Launch, Storage, Stream, Value, Write, either

_K = TypeVar("_K")
Seen = dict[Stream | None, int]  # by stream; None stands for all


@dataclass(slots=True)
class State:
    """The state at one point.

    Attributes:
        current: The current stream; None where it is not known.
        several: Stands for all streams that a name means by turns (`for s in streams`): a wait of one counts for all.
        seen: What each stream has seen of the others.
        host: What the host has waited for; every later launch comes after it.
        events: What was seen by the stream on which an event was recorded.
        pending: Launches that the host has not waited for.
        written: The last write into memory that was there before.
        names: The names of the running function.
        heap: Attributes of objects: by object and name.
        context: The line of the call that made the CUDA context; None before it.
        cuda: Whether the code so far means a CUDA device.
        awaited: When the last launch was that the host has waited for.
    """

    current: Stream | None
    several: Stream
    seen: dict[Stream, Seen] = field(default_factory=dict)
    host: Seen = field(default_factory=dict)
    events: dict[Value, tuple[Stream | None, Seen]] = field(default_factory=dict)
    pending: dict[Launch, None] = field(default_factory=dict)
    written: dict[Storage, Write | None] = field(default_factory=dict)
    names: dict[str, Value] = field(default_factory=dict)
    heap: dict[tuple[Value, str], Value] = field(default_factory=dict)
    context: int | None = None
    cuda: bool = False
    awaited: int = 0

    def copy(self) -> State:
        """Return a state that can go another way."""
        return State(
            self.current,
            self.several,
            {stream: dict(seen) for stream, seen in self.seen.items()},
            dict(self.host),
            dict(self.events),
            dict(self.pending),
            dict(self.written),
            dict(self.names),
            dict(self.heap),
            self.context,
            self.cuda,
            self.awaited,
        )

    def last_write(self, storage: Storage) -> Write | None:
        """Return how memory was written last; None where that is not known."""
        return self.written.get(storage, storage.made)

    def visible(self, write: Write | None, stream: Stream) -> bool:
        """Return whether a stream's next launch comes after a write."""
        made = write.stream if write is not None else None
        if write is None or made is None or made is stream:
            return True
        views = [self.host, self.seen.get(stream, {}), self.seen.get(self.several, {}) if stream.many else {}]
        of = [made, None, self.several] if made.many else [made, None]
        return any(write.at <= view.get(one, 0) for view in views for one in of)

    def wait(self, waiter: Stream | None, awaited: Stream | None, now: int) -> None:
        """Let one stream wait for all that was queued on another; an unknown one stands for all."""
        if waiter is None:
            # somebody waits, and nobody knows who: assume that it is the one who has to
            for stream in list(self.seen):
                self._join(stream, {None: now})
            return
        if awaited is None:
            self._join(waiter, {None: now})
        else:
            self._join(waiter, self._all_of(awaited, now))

    def record(self, event: Value, stream: Stream | None, now: int) -> None:
        """Record an event on a stream."""
        self.events[event] = (stream, {None: now} if stream is None else self._all_of(stream, now))

    def wait_event(self, waiter: Stream | None, event: Value, now: int) -> None:
        """Let a stream wait for an event; for one of which nothing is known, that it was recorded just now."""
        recorded = self.events.get(event)
        if waiter is None or recorded is None:
            self.wait(waiter, None, now)
        else:
            self._join(waiter, recorded[1])

    def host_wait(self, stream: Stream | None, now: int) -> None:
        """Let the host wait for all that was queued on a stream; None is the device."""
        _maximum(self.host, self._all_of(stream, now) if stream is not None else {None: now})
        self._forget([one for one in self.pending if stream is None or one.stream is stream])

    def host_wait_event(self, event: Value, now: int) -> None:
        """Let the host wait for an event; for one of which nothing is known, for all."""
        stream, seen = self.events.get(event, (None, {None: now}))
        _maximum(self.host, seen)
        until = seen.get(stream, now)
        self._forget([one for one in self.pending if stream is None or (one.stream is stream and one.at <= until)])

    def _forget(self, launches: list[Launch]) -> None:
        """The host has waited for launches."""
        self.awaited = max([self.awaited, *(one.at for one in launches)])
        gone = set(launches)
        self.pending = {one: None for one in self.pending if one not in gone}

    def _all_of(self, stream: Stream, now: int) -> Seen:
        """Return all that a stream has seen, itself included."""
        found = {**self.seen.get(stream, {}), stream: now}
        if stream.many:
            found[self.several] = now
        return found

    def _join(self, waiter: Stream, seen: Seen) -> None:
        _maximum(self.seen.setdefault(waiter, {}), seen)
        if waiter.many:
            _maximum(self.seen.setdefault(self.several, {}), seen)


def meet(before: State, ways: list[State]) -> State:
    """Return the state where several ways meet.

    Args:
        before: The state where they parted.
        ways: Their states at the end; at least one.
    """
    if len(ways) == 1:
        return ways[0]
    first, *others = ways
    met = first.copy()
    for way in others:
        for stream, seen in way.seen.items():
            _maximum(met.seen.setdefault(stream, {}), seen)
        _maximum(met.host, way.host)
        met.events.update(way.events)
        met.current = met.current if met.current is way.current else None
        met.cuda |= way.cuda
        met.awaited = max(met.awaited, way.awaited)
        met.written.update(way.written)
        met.context = met.context if way.context is None or met.context is not None else way.context
    _meet_values(met.names, [way.names for way in ways])
    _meet_values(met.heap, [way.heap for way in ways])
    # what was pending before is pending only if no way has waited for it
    met.pending = {
        launch: None
        for way in ways
        for launch in way.pending
        if launch not in before.pending or all(launch in other.pending for other in ways)
    }
    return met


def _meet_values(met: dict[_K, Value], ways: list[dict[_K, Value]]) -> None:
    """Let each key mean what it means on any way; `met` begins as the first way's."""
    for way in ways[1:]:
        for key, value in way.items():
            known = met.get(key)
            if known is not value:
                met[key] = value if known is None else either(known, value)


def _maximum(into: Seen, other: Seen) -> None:
    for stream, at in other.items():
        if at > into.get(stream, 0):
            into[stream] = at
