"""Rows that all threads of a program append to at once, and that become columns when nobody writes any more.

A thread can be interrupted between any two lines, and within a thread a garbage collection can call a finalizer that
is written down, too. So a row goes in whole, by one call that runs in C, or its columns would be mixed with another's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from torchweave.trace.log import (
    OP,
    Accesses,
    Collections,
    Events,
    Log,
    Moments,
    Operators,
    Spans,
    Streams,
    Table,
    Uses,
)

_T = TypeVar("_T", bound=Table)
_SPAN, _EVENT, _MOMENT, _USE, _COLLECTION, _STREAM = 5, 6, 4, 4, 4, 4
# the rows of operators and of their memory begin with the operator's number: it is what joins them to their event
_OPERATOR, _ACCESS = 2, 5


class Tables:
    """The tables of one log while it grows.

    Attributes:
        spans: Rows as `Spans` has columns, one behind the other; `spans.extend(row)` appends one.
        events: As `Events`; `b` of an operator is its number.
        operators: Number, name.
        accesses: Number of the operator, then as `Accesses`.
        samples: As `Moments`.
        uses: As `Uses`.
        collections: As `Collections`.
        clocks: Rows as `Moments`, each a list of its own, since the last read of a loop that waits replaces the one
            before.
    """

    def __init__(self) -> None:
        self.spans: list[int] = []
        self.events: list[int] = []
        self.operators: list[int] = []
        self.accesses: list[int] = []
        self.samples: list[int] = []
        self.uses: list[int] = []
        self.collections: list[int] = []
        self.clocks: list[list[int]] = []

    @property
    def num_spans(self) -> int:
        """How many calls there are."""
        return len(self.spans) // _SPAN

    def into(self, log: Log) -> None:
        """Write all rows into the columns of a log."""
        # in the order opposite to writing: what an event names is there
        log.events = _table(Events, self.events, _EVENT)
        log.operators, log.accesses, rows = _joined(self.operators[:], self.accesses[:])
        log.events.b = [rows[b] if kind == OP else b for kind, b in zip(log.events.kind, log.events.b, strict=True)]
        log.spans = _table(Spans, self.spans, _SPAN)
        log.samples = _table(Moments, self.samples, _MOMENT)
        log.uses = _table(Uses, self.uses, _USE)
        log.collections = _table(Collections, self.collections, _COLLECTION)
        log.clocks = _table(Moments, [value for row in self.clocks[:] for value in row], _MOMENT)


class Numbers:
    """Gives things numbers, from 0, the same for the same thing, whoever asks at once."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._rows: dict[object, int] = {}

    def of(self, key: object) -> int:
        """Return a thing's number."""
        row = self._rows.get(key)
        # where two threads ask at once, both get the first one's number, and the other's stays unused
        return self._rows.setdefault(key, next(self._next)) if row is None else row

    def in_order(self, unused: object) -> list[object]:
        """Return all things by their numbers.

        Args:
            unused: What to put where a number belongs to nothing.
        """
        rows = dict(self._rows)
        found = [unused] * (max(rows.values(), default=-1) + 1)
        for key, row in rows.items():
            found[row] = key
        return found


class MadeStreams:
    """Stream objects in the order of making; their numbers stay for as long as the program is watched."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._flat: list[int] = []

    def add(self, pointer: int, place: int, *, external: bool) -> int:
        """Write a stream object down, and return its row."""
        row = next(self._next)
        self._flat.extend((row, pointer, place, int(external)))
        return row

    def table(self) -> Streams:
        """Return them as a table."""
        flat = self._flat[:]
        rows = sorted(zip(*(flat[column::_STREAM] for column in range(_STREAM)), strict=True))
        found = Streams()
        for row, pointer, place, external in rows:
            while len(found) < row:
                # whose thread is between its two lines
                _append(found, (-1, -1, 1))
            _append(found, (pointer, place, external))
        return found


def _append(table: Table, row: Sequence[int]) -> None:
    for name, value in zip(table.__struct_fields__, row, strict=True):
        getattr(table, name).append(value)


def _table(kind: type[_T], flat: list[int], width: int) -> _T:
    """Return rows that lie one behind the other as columns."""
    rows = flat[:]
    return kind(*(rows[column::width] for column in range(width)))


def _joined(operators: list[int], accesses: list[int]) -> tuple[Operators, Accesses, dict[int, int]]:
    """Return operators with their memory in the order of their numbers, and the row of each number."""
    memory: dict[int, list[int]] = {}
    for at in range(0, len(accesses), _ACCESS):
        memory.setdefault(accesses[at], []).extend(accesses[at + 1 : at + _ACCESS])
    found, flat, rows = Operators(), list[int](), dict[int, int]()
    width = _ACCESS - 1
    for number, name in sorted(zip(*(operators[column::_OPERATOR] for column in range(_OPERATOR)), strict=True)):
        rows[number] = len(found)
        _append(found, (name, len(flat) // width))
        flat += memory.get(number, [])
    return found, Accesses(*(flat[column::width] for column in range(width))), rows
