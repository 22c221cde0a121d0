"""Events to numpy columns, piece by piece: strings become codes, times integer nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchweave.trace.events import (
    ANNOTATION,
    CALL,
    CATEGORIES,
    ELEMENT_BYTES,
    FRAME,
    OP,
    OVERHEAD,
    WAIT,
    WORK,
    Args,
    Event,
)
from torchweave.trace.timeline import COPY, KERNEL, MEMSET

Column: TypeAlias = npt.NDArray[Any]

# Times further than this from the first event are damage: 100 days, in us. Keeps nanoseconds inside int64.
_PLAUSIBLE_US = 100 * 86_400 * 1e6
_NO_ARGS = Args()


class Codes:
    """Gives each distinct value a small number, in order of first appearance."""

    def __init__(self) -> None:
        self._codes: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._codes)

    def of(self, values: Iterable[Hashable]) -> list[int]:
        """Return the codes of values, giving new ones where needed."""
        codes = self._codes
        result = []
        for value in values:
            code = codes.get(value)
            if code is None:
                code = codes[value] = len(codes)
            result.append(code)
        return result

    def values(self) -> tuple[Any, ...]:
        """Return the values in the order of their codes."""
        return tuple(self._codes)


class Columns:
    """Collects events of all pieces as columns, one set a category.

    Attributes:
        names: Codes of all names.
        threads: Codes of (process, thread) pairs.
        base_us: The first event's time, which all others are taken from before they are rounded to ns; None
            before the first event.
        num_events: Rows of categories that are read.
        num_dropped: Of them, rows whose times were no numbers or not plausible.
        num_rows: All rows.
        num_phases: Rows that are events at all, counted until the first piece that holds some.
    """

    def __init__(self) -> None:
        self.names, self.threads = Codes(), Codes()
        self.base_us: float | None = None
        self.num_events = self.num_dropped = self.num_rows = self.num_phases = 0
        self._parts: dict[int, list[dict[str, Column]]] = {kind: [] for kind in range(7)}

    def add(self, events: Sequence[Event]) -> None:
        """Add the events of one piece."""
        buckets: dict[int, list[Event]] = {kind: [] for kind in range(7)}
        kinds = dict(CATEGORIES)
        self.num_rows += len(events)
        for category, event in zip(_texts([event.cat for event in events]), events, strict=True):
            kind = kinds.get(category)
            if kind is None:
                kind = kinds[category] = kinds.get(category.lower(), -1)
            if kind >= 0 and event.ph == "X":
                buckets[kind].append(event)
        if self.num_phases == 0:
            self.num_phases = sum(type(event.ph) is str for event in events)
        for kind, rows in buckets.items():
            if rows:
                self._add(kind, rows)

    def column(self, kind: int, name: str) -> Column:
        """Return one column of one category, over all pieces."""
        parts = self._parts[kind]
        if not parts:
            return np.zeros(0, dtype=np.int64)
        return np.concatenate([part[name] for part in parts])

    def _add(self, kind: int, rows: list[Event]) -> None:
        self.num_events += len(rows)
        begin, end, good = self._times(rows)
        if not good.all():
            self.num_dropped += int((~good).sum())
            rows = [row for row, keep in zip(rows, good, strict=True) if keep]
            begin, end = begin[good], end[good]
        if not rows:
            return
        part = {"begin": begin, "end": end, "name": self._names(rows)}
        part |= _READERS[kind](rows, [row.args or _NO_ARGS for row in rows], self)
        self._parts[kind].append(part)

    def _times(self, rows: list[Event]) -> tuple[Column, Column, Column]:
        """Return begins and ends in ns, and which of them are plausible."""
        begin_us, length_us = floats([row.ts for row in rows]), floats([row.dur for row in rows])
        if self.base_us is None:
            finite = begin_us[np.isfinite(begin_us)]
            self.base_us = float(math.floor(np.median(finite))) if len(finite) else 0.0
        begin_us = begin_us - self.base_us
        with np.errstate(invalid="ignore"):
            good = (np.abs(begin_us) < _PLAUSIBLE_US) & (length_us >= 0) & (length_us < _PLAUSIBLE_US)
        begin_us, length_us = np.where(good, begin_us, 0.0), np.where(good, length_us, 0.0)
        begin = np.rint(begin_us * 1e3).astype(np.int64)
        return begin, begin + np.rint(length_us * 1e3).astype(np.int64), good

    def _names(self, rows: list[Event]) -> Column:
        return np.array(self.names.of(_texts([row.name for row in rows])), dtype=np.int64)

    def thread_codes(self, rows: list[Event]) -> Column:
        """Return the codes of the threads of host rows."""
        processes, threads = [row.pid for row in rows], [row.tid for row in rows]
        try:
            pairs = np.array([processes, threads])
        except (TypeError, ValueError, OverflowError):
            pairs = np.array(0.0)
        if pairs.dtype.kind != "i" or pairs.ndim != 2:
            texts = zip(map(str, processes), map(str, threads), strict=True)
            return np.array(self.threads.of(texts), dtype=np.int64)
        # few threads, many rows: code the runs between changes of thread
        changes = np.flatnonzero(np.concatenate(([True], (pairs[:, 1:] != pairs[:, :-1]).any(axis=0))))
        keys = [(str(process), str(thread)) for process, thread in pairs[:, changes].T.tolist()]
        runs = np.diff(np.append(changes, len(rows)))
        return np.repeat(np.array(self.threads.of(keys), dtype=np.int64), runs)


def _texts(values: list[Any]) -> list[str]:
    """Return values as texts; nearly always they all are."""
    if set(map(type, values)) <= {str}:
        return values
    return [value if type(value) is str else str(value) for value in values]


def floats(values: list[Any]) -> npt.NDArray[np.float64]:
    """Return numbers as float64; what is none becomes NaN."""
    try:
        array = np.array(values, dtype=np.float64)
        # lists of one length would make a table
        if array.ndim == 1:
            return array
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([_float(value) for value in values], dtype=np.float64)


def ints(values: list[Any], default: int = -1) -> npt.NDArray[np.int64]:
    """Return numbers as int64; what is none becomes `default`."""
    try:
        array = np.array(values)
        if array.dtype.kind == "i" and array.ndim == 1:
            return array.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([_int(value, default) for value in values], dtype=np.int64)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _int(value: Any, default: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if -(2**62) < number < 2**62 else default


def _product(value: Any) -> int:
    """Return how many blocks or threads `[x, y, z]` is, -1 where that is not recorded."""
    if value is None:
        return -1
    product = 1
    try:
        x, y, z = value
        product = x * y * z
    except (TypeError, ValueError):
        product = 0
    if type(product) is int and 0 < product < 2**62:
        return product
    if not isinstance(value, list) or not value:
        return -1
    product = 1
    for item in value:
        product *= max(_int(item, 0), 0)
    return product if 0 < product < 2**62 else -1


def _or(first: Any, second: Any) -> Any:
    return second if first is None else first


def _work(rows: list[Event], args: list[Args], to: Columns) -> dict[str, Column]:
    kinds = {row.cat: _kind(str(row.cat)) for row in rows}
    large = [max(a, b) for a, b in zip(_each(args, "elements_in"), _each(args, "elements_out"), strict=True)]
    return {
        "kind": np.array([kinds[row.cat] for row in rows], dtype=np.int64),
        "device": ints([_or(arg.device, row.pid) for row, arg in zip(rows, args, strict=True)], 0),
        "stream": ints([_or(arg.stream, row.tid) for row, arg in zip(rows, args, strict=True)], 0),
        "correlation": ints([arg.correlation for arg in args]),
        "external": _external(args),
        "num_bytes": ints([arg.num_bytes for arg in args]),
        "blocks": np.array([_product(arg.grid) for arg in args], dtype=np.int64),
        "threads": np.array([_product(arg.block) for arg in args], dtype=np.int64),
        "registers": ints([arg.registers for arg in args]),
        "shared_bytes": ints([arg.shared for arg in args]),
        "collective": _optional_names([arg.collective for arg in args], to.names),
        "group": _optional_names([arg.group for arg in args], to.names),
        "elements": np.array(large, dtype=np.int64),
        "element_bytes": np.array([ELEMENT_BYTES.get(str(a.dtype), -1) if a.dtype else -1 for a in args], np.int64),
    }


def _external(args: list[Args]) -> Column:
    """Return the numbers of operators; recorders of 2021 wrote their name in lower case."""
    numbers = ints([arg.external for arg in args])
    return ints([arg.external_old for arg in args]) if (numbers == -1).all() else numbers


def _kind(category: str) -> int:
    return COPY if "memcpy" in category.lower() else MEMSET if "memset" in category.lower() else KERNEL


def _each(args: list[Args], name: str) -> list[int]:
    return [int(value) for value in ints([getattr(arg, name) for arg in args])]


def _optional_names(values: list[Any], names: Codes) -> Column:
    present = [str(value) for value in values if value is not None]
    result = np.full(len(values), -1, dtype=np.int64)
    if present:
        result[[i for i, value in enumerate(values) if value is not None]] = names.of(present)
    return result


def _call(rows: list[Event], args: list[Args], to: Columns) -> dict[str, Column]:
    return {
        "thread": to.thread_codes(rows),
        "correlation": ints([arg.correlation for arg in args]),
        "external": _external(args),
    }


def _op(rows: list[Event], args: list[Args], to: Columns) -> dict[str, Column]:
    return {
        "thread": to.thread_codes(rows),
        "external": _external(args),
        "sequence": ints([arg.sequence for arg in args]),
    }


def _span(rows: list[Event], _: list[Args], to: Columns) -> dict[str, Column]:
    return {"thread": to.thread_codes(rows)}


def _wait(rows: list[Event], args: list[Args], _: Columns) -> dict[str, Column]:
    return {
        "stream": ints([_or(arg.stream, row.tid) for row, arg in zip(rows, args, strict=True)]),
        "correlation": ints([arg.correlation for arg in args]),
        "record_correlation": ints([arg.record_correlation for arg in args]),
        "on_stream": ints([arg.wait_on_stream for arg in args]),
    }


_READERS: dict[int, Callable[[list[Event], list[Args], Columns], dict[str, Column]]] = {
    WORK: _work,
    CALL: _call,
    OP: _op,
    FRAME: _span,
    ANNOTATION: _span,
    OVERHEAD: _span,
    WAIT: _wait,
}
