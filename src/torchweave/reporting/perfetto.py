"""A trace that Perfetto loads, with the diagnosis as tracks of its own: beside the lanes, or in its own trace.

Source: "Trace Event Format", the Chromium project's description of the JSON that Perfetto reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torchweave.diagnose.model import CauseFound, Diagnosis, Lane, Where
from torchweave.errors import UsageError
from torchweave.intervals import Intervals
from torchweave.reporting.output import open_output
from torchweave.reporting.source import Source
from torchweave.reporting.tracks import both_sides, side_titles

# Beyond every process and thread number of an operating system, so that ours meet none of the trace's.
_PROCESS = 2_000_000_000
_LANES = _PROCESS + 10_000
# Evidence and mend are repeated on each of a cause's slices, up to so many: the longest.
_NUM_FULL = 2_000


def write_perfetto(diagnosis: Diagnosis, source: str | Path | None, path: str | Path) -> None:
    """Write a diagnosis as a Chrome trace for Perfetto, compressed where the name ends in `.gz`.

    Args:
        diagnosis: What was found.
        source: The trace it was found in. Kineto's JSON keeps its events, and the tracks lie on its clock; from
            another format, or without one, the lanes are written instead.
        path: The file; one that exists is replaced.

    Raises:
        UsageError: The file cannot be written, or is the source itself.
        UnreadableInputError: The source cannot be read.
    """
    source = None if source is None else Path(source)
    path = Path(path)
    if source is not None and path.exists() and path.samefile(source):
        raise UsageError("A report must not replace its trace", given=str(path), remedy="choose another name")
    kept = None if source is None else Source.of(source)
    with open_output(path) as file:
        if kept is None:
            head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": diagnosis.origin_ns}
            file.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
            file.write(_joined(_events(diagnosis, 0, lanes=True)))
            file.write(b"\n]}\n")
        else:
            events = _joined(_events(diagnosis, diagnosis.origin_ns - kept.base_ns, lanes=False))
            for part in kept.with_events(events):
                file.write(part)


def _joined(events: Iterator[str]) -> bytes:
    return ",\n".join(events).encode()


def _events(diagnosis: Diagnosis, shift_ns: int, *, lanes: bool) -> Iterator[str]:
    """Yield the events of all our tracks as JSON.

    Args:
        diagnosis: What was found.
        shift_ns: What the window's begin is on the file's clock.
        lanes: Whether to write the operations too.
    """
    yield from _process(_PROCESS, f"torchweave why: {diagnosis.verdict}", -2)
    yield from _verdict(diagnosis, shift_ns)
    thread = _PROCESS + 1
    if diagnosis.sides.names:
        yield _meta("thread_name", _PROCESS, thread, name="both sides run")
        yield from _slices(both_sides(diagnosis), "both sides run", "{}", thread, shift_ns)
    for number, found in enumerate(diagnosis.causes, 1):
        yield from _cause(found, number, thread + number, shift_ns)
    if lanes:
        for device in sorted({lane.device for lane in diagnosis.lanes}):
            yield from _process(_LANES + device, f"GPU {device}", -1)
        thread = _LANES + 10_000
        for lane in diagnosis.lanes:
            for events, level in _levels(lane):
                thread += 1
                yield from _lane(diagnosis, lane, events, level, thread, shift_ns)


def _process(process: int, name: str, order: int) -> Iterator[str]:
    yield _meta("process_name", process, process, name=name)
    yield _meta("process_sort_index", process, process, sort_index=order)


def _meta(kind: str, process: int, thread: int, **args: Any) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args})


def _us(ns: int) -> str:
    """Return ns as us, exactly."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def _slice(name: str, begin: int, end: int, process: int, thread: int, args: str) -> str:
    """Return one slice; name and args are JSON already.

    Perfetto reads times as doubles, which are coarse on a clock that counts from 1970, and drops a slice that
    overlaps another of its track. The length is therefore taken between the two times as it reads them: what
    touched, touches.
    """
    length = _as_read(end) - _as_read(begin)
    return (
        f'{{"ph": "X", "cat": "torchweave", "name": {name}, "pid": {process}, "tid": {thread}, '
        f'"ts": {_us(begin)}, "dur": {_us(length)}, "args": {args}}}'
    )


def _as_read(ns: int) -> int:
    return round(float(_us(ns)) * 1000)


def _slices(times: Intervals, name: str, args: str, thread: int, shift_ns: int) -> Iterator[str]:
    name = json.dumps(name)
    for begin, end in (times + shift_ns).tolist():
        yield _slice(name, begin, end, _PROCESS, thread, args)


def _verdict(diagnosis: Diagnosis, shift_ns: int) -> Iterator[str]:
    """Yield one slice over the window: the sentence, with the numbers as its arguments."""
    numbers = diagnosis.numbers
    args: dict[str, Any] = {
        "verdict": diagnosis.verdict,
        "sides": " and ".join(diagnosis.sides.names) or "none",
        "sides_why": diagnosis.sides.why,
        **{name: getattr(numbers, name) for name in numbers.__slots__},
    }
    if diagnosis.communication is not None:
        found = diagnosis.communication
        args |= {f"communication_{name}": getattr(found, name) for name in found.__slots__}
    args |= {f"not_known_{row}": text for row, text in enumerate(diagnosis.not_known, 1)}
    args |= {f"warning_{row}": text for row, text in enumerate(diagnosis.warnings, 1)}
    yield _meta("thread_name", _PROCESS, _PROCESS, name="verdict")
    end = shift_ns + round(numbers.span_ms * 1e6)
    yield _slice(json.dumps(diagnosis.sentence), shift_ns, end, _PROCESS, _PROCESS, json.dumps(args))


def _cause(found: CauseFound, number: int, thread: int, shift_ns: int) -> Iterator[str]:
    """Yield a cause's track: a slice for each moment that was charged to it."""
    yield _meta("thread_name", _PROCESS, thread, name=f"cause {number}: {found.cause} ({found.cost_ms:.3f} ms)")
    args = {
        "cause": found.cause,
        "lost_ms": found.lost_ms,
        "idle_ms": found.idle_ms,
        "certainty": found.certainty,
        "recoverable": found.recoverable,
        "evidence": found.evidence,
        "where": _where(found.where),
        "mend": found.mend,
    }
    full, short = json.dumps(args), json.dumps({"evidence": "on the longest slices of this track"})
    kinds = (("lost overlap", found.lost_intervals), ("idle", found.idle_intervals))
    lengths = np.sort(np.concatenate([times[:, 1] - times[:, 0] for _, times in kinds]))
    least = int(lengths[-_NUM_FULL]) if len(lengths) > _NUM_FULL else 0
    for kind, times in kinds:
        long = times[:, 1] - times[:, 0] >= least
        name = f"{found.cause}: {kind}"
        yield from _slices(times[long], name, full, thread, shift_ns)
        yield from _slices(times[~long], name, short, thread, shift_ns)


def _where(where: Where) -> str:
    at = "" if where.file is None else where.file if where.line is None else f"{where.file}:{where.line}"
    known = (where.caller, at, where.function, where.op, where.call)
    return ", ".join(text for text in known if text) or "not recorded"


def _levels(lane: Lane) -> Iterator[tuple[list[int], int]]:
    """Yield a lane's operations as rows of tracks on which none overlaps another, as Perfetto wants it."""
    if not len(lane.begin) or (lane.begin[1:] >= np.maximum.accumulate(lane.end)[:-1]).all():
        yield list(range(len(lane.begin))), 0
        return
    ends: list[int] = []
    rows: list[list[int]] = []
    for row, (begin, end) in enumerate(zip(lane.begin.tolist(), lane.end.tolist(), strict=True)):
        level = next((level for level, free in enumerate(ends) if free <= begin), len(ends))
        if level == len(ends):
            ends.append(0)
            rows.append([])
        ends[level] = end
        rows[level].append(row)
    for level, events in enumerate(rows):
        yield events, level


def _lane(diagnosis: Diagnosis, lane: Lane, events: list[int], level: int, thread: int, shift_ns: int) -> Iterator[str]:
    process = _LANES + lane.device
    name = f"stream {lane.stream}" + (f" ({level + 1})" if level else "")
    yield _meta("thread_name", process, thread, name=name)
    names = {code: json.dumps(diagnosis.names[code]) for code in np.unique(lane.name).tolist()}
    sides = ("neither", *side_titles(diagnosis))
    args = [json.dumps({"stream": lane.stream, "device": lane.device, "side": side}) for side in sides]
    begin, end = (lane.begin[events] + shift_ns).tolist(), (lane.end[events] + shift_ns).tolist()
    name_of, side_of = lane.name[events].tolist(), lane.side[events].tolist()
    for row in range(len(events)):
        yield _slice(names[name_of[row]], begin[row], end[row], process, thread, args[side_of[row]])
