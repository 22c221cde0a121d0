"""A trace and the log of the same run, joined: lines as frames, events' records for waits, numbers of streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from torchweave.intervals import union
from torchweave.trace.log import OP, RECORD, WAIT, Log
from torchweave.trace.timeline import Ints, Spans, Timeline, Waits

ANCHOR = "torchweave.clock"
# A stretch of a thread this long without a call of which the line is known gets a line from samples.
_GAP_NS = 1_000_000
# An event is written down this long after its call's begin, at most; and two clocks differ by so much.
_LATE_NS, _SLACK_NS = 5_000_000, 20_000
# what the program wrote for an operator of another name
_WRITTEN = {"_local_scalar_dense": "item", "_to_copy": "to"}
_VARIABLES = {
    "launch_blocking": "CUDA_LAUNCH_BLOCKING",
    "max_connections": "CUDA_DEVICE_MAX_CONNECTIONS",
    "module_loading": "CUDA_MODULE_LOADING",
}


def with_log(timeline: Timeline, log: Log) -> Timeline:
    """Return a trace with what the log of its run adds.

    Args:
        timeline: The trace.
        log: The log; its times become those of the trace, ns since the origin.
    """
    log = _moved(log, _shift(timeline, log))
    codes = _thread_codes(timeline, log)
    joined = replace(timeline, threads=_named(timeline, codes), log=log)
    joined = replace(joined, streams=_streams(joined, codes))
    rank, world = (_number(log.about.get(name)) for name in ("rank", "world_size"))
    metadata = {name: log.environment[variable] for name, variable in _VARIABLES.items() if variable in log.environment}
    names = {name: code for code, name in enumerate(timeline.names)}
    frames = _frames(log, codes, names)
    return replace(
        joined,
        names=tuple(names),
        frames=_merged(timeline.frames, frames),
        waits=_waits(joined, codes),
        rank=rank if timeline.rank is None else timeline.rank,
        world_size=world if timeline.world_size is None else timeline.world_size,
        metadata={**timeline.metadata, **metadata},
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _shift(timeline: Timeline, log: Log) -> int:
    """Return what to add to the log's times: the origin, and by how much the recorder's clock is off.

    Each anchor lies between the log's two times around it, which bounds what the clocks can differ by. Where they need
    not differ at all they do not.
    """
    notes = timeline.annotations
    named = np.array([name == ANCHOR for name in timeline.names] or [False])
    rows = np.flatnonzero(named[notes.name]) if len(notes) else np.zeros(0, dtype=np.int64)
    if len(rows) == 0 or len(rows) != len(log.anchors):
        return -timeline.origin_ns
    around = np.array(log.anchors, dtype=np.int64)
    least = int((notes.end[rows] - around[:, 1]).max())
    most = int((notes.begin[rows] - around[:, 0]).min())
    return min(max(-timeline.origin_ns, least), most) if least <= most else (least + most) // 2


def _moved(log: Log, shift: int) -> Log:
    """Return the log with times of the trace."""
    moved = Log(**{name: getattr(log, name) for name in log.__struct_fields__})
    for table, columns in (
        ("spans", ("begin", "end")),
        ("events", ("at",)),
        ("clocks", ("at",)),
        ("samples", ("at",)),
        ("uses", ("at",)),
        ("collections", ("begin", "end")),
    ):
        old = getattr(log, table)
        new = type(old)(**{name: getattr(old, name) for name in old.__struct_fields__})
        for column in columns:
            setattr(new, column, [value + shift for value in getattr(old, column)])
        setattr(moved, table, new)
    return moved


def _thread_codes(timeline: Timeline, log: Log) -> dict[int, int]:
    """Return the trace's code of each thread of the log: of equal numbers, the one with the most rows."""
    rows = np.bincount(np.concatenate((timeline.ops.thread, timeline.calls.thread)), minlength=len(timeline.threads))
    known: dict[str, int] = {}
    for code, name in enumerate(timeline.threads):
        if name not in known or rows[code] > rows[known[name]]:
            known[name] = code
    tables = (log.spans, log.events, log.clocks, log.samples, log.uses)
    result: dict[int, int] = {}
    for number in sorted({number for table in tables for number in table.thread}):
        result[number] = known.get(str(number), len(timeline.threads) + sum(str(n) not in known for n in result))
    return result


def _named(timeline: Timeline, codes: Mapping[int, int]) -> tuple[str, ...]:
    return timeline.threads + tuple(str(number) for number, code in codes.items() if code >= len(timeline.threads))


def _codes(threads: Sequence[int], codes: Mapping[int, int]) -> Ints:
    return np.array([codes[number] for number in threads], dtype=np.int64)


def _streams(timeline: Timeline, codes: Mapping[int, int]) -> dict[int, int]:
    """Return the recorder's number of each CUDA stream: that of most work launched while it was current."""
    assert timeline.log is not None
    events, uses, work, calls = timeline.log.events, timeline.log.uses, timeline.work, timeline.calls
    known = work.call >= 0
    if not known.any():
        return {}
    rows = np.flatnonzero(np.array(events.kind, dtype=np.int64) == OP)
    at, thread = np.array(events.at, dtype=np.int64)[rows], _codes(events.thread, codes)[rows]
    launched = (calls.begin[work.call[known]], calls.thread[work.call[known]], work.stream[known])
    votes: Counter[tuple[int, int]] = Counter()
    # the operator that ends first after a launch is the one around it; a stream is current since it was last set
    _vote(votes, at, thread, np.array(events.a, dtype=np.int64)[rows], launched, before=False)
    if not votes:
        set_at, set_on = np.array(uses.at, dtype=np.int64), _codes(uses.thread, codes)
        _vote(votes, set_at, set_on, np.array(uses.pointer, dtype=np.int64), launched, before=True)
    result: dict[int, int] = {}
    for (stream, seen), _ in votes.most_common():
        result.setdefault(stream, seen)
    return result


def _vote(
    votes: Counter[tuple[int, int]],
    at: Ints,
    thread: Ints,
    pointer: Ints,
    launched: tuple[Ints, Ints, Ints],
    *,
    before: bool,
) -> None:
    """Let each launch vote for the CUDA stream of the moment before it, or of that after it, on its thread."""
    launch, launcher, number = launched
    for code in np.unique(thread).tolist():
        mine, theirs = np.flatnonzero(thread == code), np.flatnonzero(launcher == code)
        row = np.searchsorted(at[mine], launch[theirs]) - before
        inside = (row >= 0) & (row < len(mine))
        votes.update(zip(pointer[mine[row[inside]]].tolist(), number[theirs[inside]].tolist(), strict=True))


def _frames(log: Log, codes: Mapping[int, int], names: dict[str, int]) -> Spans:
    """Return the lines of the log as frames: for each call the user's own, and what it called."""
    rows: list[tuple[int, int, int, int]] = []

    def add(begin: int, end: int, thread: int, name: str) -> None:
        rows.append((begin, end, codes[thread], names.setdefault(name, len(names))))

    spans = log.spans
    for begin, end, thread, place, name in zip(
        spans.begin, spans.end, spans.thread, spans.place, spans.name, strict=True
    ):
        frame = log.place(place)
        if frame is not None:
            add(begin, end, thread, _frame_name(frame))
            called = log.names[name].rpartition("::")[2].partition(".")[0] if name >= 0 else "call"
            add(begin, end, thread, f"<built-in function {_WRITTEN.get(called, called)}>")
    for begin, end, thread, frame in _between(log):
        add(begin, end, thread, _frame_name(frame))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Spans(*(columns[:, column] for column in range(4)))


def _frame_name(frame: tuple[str, int, str]) -> str:
    return f"{frame[0]}({frame[1]}): {frame[2]}"


def _between(log: Log) -> list[tuple[int, int, int, tuple[str, int, str]]]:
    """Return long stretches between calls, each with the frame in which most samples of it lie."""
    result = []
    for thread in sorted(set(log.spans.thread)):
        mine = [row for row, number in enumerate(log.spans.thread) if number == thread]
        busy = union([(log.spans.begin[row], log.spans.end[row]) for row in mine])
        # which span ended last before each stretch
        order = sorted(mine, key=lambda row: log.spans.end[row])
        ends = [log.spans.end[row] for row in order]
        seen = _seen(log, thread)
        at = [moment for moment, _ in seen]
        for begin, end in zip(busy[:-1, 1].tolist(), busy[1:, 0].tolist(), strict=True):
            if end - begin < _GAP_NS:
                continue
            inside = seen[int(np.searchsorted(at, begin)) : int(np.searchsorted(at, end))]
            before = order[int(np.searchsorted(ends, begin, side="right")) - 1]
            frame = _most([found for _, place in inside if (found := log.place(place))])
            frame = frame or log.place(log.spans.place[before])
            if frame is not None:
                result.append((begin, end, thread, frame))
    return result


def _seen(log: Log, thread: int) -> list[tuple[int, int]]:
    """Return the moments at which a thread's place is known, and the place: samples, and reads of clocks."""
    tables = (log.samples, log.clocks)
    found = [
        (at, place)
        for table in tables
        for at, number, place in zip(table.at, table.thread, table.place, strict=True)
        if number == thread
    ]
    return sorted(found)


def _most(frames: Sequence[tuple[str, int, str]]) -> tuple[str, int, str] | None:
    """Return the most frequent line of the most frequent function."""
    if not frames:
        return None
    (file, function), _ = Counter((file, function) for file, _, function in frames).most_common(1)[0]
    line, _ = Counter(line for of, line, name in frames if (of, name) == (file, function)).most_common(1)[0]
    return file, line, function


def _merged(old: Spans, new: Spans) -> Spans:
    columns = {name: np.concatenate((getattr(old, name), getattr(new, name))) for name in Spans.__slots__}
    order = np.lexsort((-columns["end"], columns["begin"]))
    return Spans(**{name: column[order] for name, column in columns.items()})


def _waits(timeline: Timeline, codes: Mapping[int, int]) -> Waits:
    """Return the waits of streams with the records of their events, which newer recorders lose."""
    assert timeline.log is not None
    events, calls, old = timeline.log.events, timeline.calls, timeline.waits
    wait = _calls_of(timeline, codes, WAIT, "StreamWaitEvent")
    record = _calls_of(timeline, codes, RECORD, "EventRecord")
    place = {number: row for row, number in enumerate(old.correlation.tolist())}
    columns = {name: getattr(old, name).tolist() for name in Waits.__slots__}
    last: dict[int, int] = {}
    for row, kind in enumerate(events.kind):
        if kind == RECORD:
            last[events.a[row]] = row
        call = wait.get(row, -1)
        if kind != WAIT or call < 0:
            continue
        recorded = last.get(events.a[row], -1)
        number = int(calls.correlation[call])
        stream = timeline.streams.get(events.b[row], -1)
        if number not in place and stream >= 0:
            place[number] = len(columns["begin"])
            for name, value in zip(Waits.__slots__, (int(calls.begin[call]), stream, number, -1, -1), strict=True):
                columns[name].append(value)
        at = place.get(number, -1)
        if at >= 0 and recorded >= 0:
            by = record.get(recorded, -1)
            if by >= 0:
                columns["record_correlation"][at] = int(calls.correlation[by])
            columns["on_stream"][at] = timeline.streams.get(events.b[recorded], columns["on_stream"][at])
    order = np.argsort(np.array(columns["begin"], dtype=np.int64), kind="stable")
    return Waits(**{name: np.array(values, dtype=np.int64)[order] for name, values in columns.items()})


def _calls_of(timeline: Timeline, codes: Mapping[int, int], kind: int, name: str) -> dict[int, int]:
    """Return, for each event of a kind, the runtime call that it came from: the last of its name on its thread."""
    assert timeline.log is not None
    events, calls = timeline.log.events, timeline.calls
    named = np.array([name in text for text in timeline.names] or [False])
    rows = np.flatnonzero(named[calls.name]) if len(calls) else np.zeros(0, dtype=np.int64)
    by_thread = {code: rows[calls.thread[rows] == code] for code in set(codes.values())}
    result: dict[int, int] = {}
    for row, (of, at, thread) in enumerate(zip(events.kind, events.at, events.thread, strict=True)):
        mine = by_thread.get(codes[thread])
        if of != kind or mine is None or len(mine) == 0:
            continue
        found = int(np.searchsorted(calls.begin[mine], at + _SLACK_NS, side="right")) - 1
        if found >= 0 and at - int(calls.begin[mine[found]]) <= _LATE_NS:
            result[row] = int(mine[found])
    return result
