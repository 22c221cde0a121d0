"""What the launching threads did, as one line of labelled times for each."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from torchweave.diagnose.calls import NO_CAUSE, causes_of_calls, guessed_causes, names_matching
from torchweave.diagnose.causes import CODE
from torchweave.diagnose.loading import LOADING, loading_times, slow_first_launches
from torchweave.diagnose.window import Window
from torchweave.intervals import EMPTY, Intervals, complement, intersection, length, overlaps, union
from torchweave.trace.timeline import Flags, Ints, Timeline

# The label of times in which a thread was simply launching, or its partner was: what they mean depends on the
# queue of the running side.
ISSUING = -1

# A gap this long without operator or call is the host doing something else; shorter ones are Python between two.
LONG_GAP_NS = 1_000_000

# How long after a call's end the last operation may end for the call to have drained the queues.
_DRAIN_NS = 20_000

_MOST_CALLERS = 8

_PROFILER = re.compile(r"Activity Buffer|Instrumentation|Resource", re.IGNORECASE)
_BUFFER_FULL = re.compile(r"Command Buffer Full", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HostLine:
    """One logical thread's time, sorted and without gaps or overlaps inside the window.

    Attributes:
        begin: Begins, ns.
        end: Ends, ns.
        label: Code of the cause that the time is charged to, or ISSUING.
        call: The call behind it, row of the timeline's calls, or -1.
        likely: True where the label fits best and is not proven.
    """

    begin: Ints
    end: Ints
    label: Ints
    call: Ints
    likely: Flags


@dataclass(frozen=True, slots=True)
class Host:
    """The launching threads of a window.

    Attributes:
        lines: One line a logical thread.
        thread: For each thread code of the trace, its logical thread.
        cause_of_call: For each call, the code of its own cause, or NO_CAUSE.
    """

    lines: dict[int, HostLine]
    thread: Ints
    cause_of_call: Ints


@dataclass(slots=True)
class _Layer:
    """Times with one label each, before they are laid over one another."""

    begin: Ints
    end: Ints
    label: Ints
    call: Ints
    likely: bool = False


def read_host(window: Window) -> Host:
    """Label the time of every thread that launched work of the window."""
    timeline = window.timeline
    calls, ops = timeline.calls, timeline.ops
    of_call = causes_of_calls(timeline)
    guessed = guessed_causes(timeline, of_call)
    merged = _logical_threads(timeline)
    launched = window.work.call[window.work.call >= 0]
    launching = np.unique(merged[calls.thread[launched]]).tolist() if len(launched) else []
    cover = {code: _cover(timeline, merged, code) for code in launching}
    launch_time = {code: _launch_time(timeline, launched, merged, code) for code in launching}
    lines = {}
    for mine in launching:
        row = merged[calls.thread] == mine
        op_row = merged[ops.thread] == mine
        layers = [
            _overhead(timeline, _PROFILER, CODE["unknown"]),
            _overhead(timeline, _BUFFER_FULL, CODE["launch_queue_full"]),
            _labelled(timeline, of_call, row & ~guessed),
            _labelled(timeline, of_call, row & guessed, likely=True),
            _loading(timeline, of_call, launched, row, op_row),
            _after_drain(window, of_call, row, launched),
            *_gaps(window, cover, launch_time, mine),
        ]
        lines[mine] = _lay(layers, window.begin, window.end)
    return Host(lines, merged, of_call)


def _lay(layers: list[_Layer], begin: int, end: int) -> HostLine:
    """Lay labelled times over one another, the first on top, and fill the rest with ISSUING."""
    free = union([(begin, end)])
    parts: list[tuple[Intervals, Ints, Ints, Flags]] = []
    for layer in layers:
        order = np.argsort(layer.begin, kind="stable")
        # times of one layer can touch or nest: each begins where all before it have ended
        reach = np.maximum.accumulate(layer.end[order]) if len(order) else layer.end
        starts = np.maximum(layer.begin[order], np.concatenate(([begin], reach[:-1]))) if len(order) else layer.begin
        row, _, pieces = overlaps(starts, layer.end[order], free)
        source = order[row]
        likely = np.full(len(row), layer.likely)
        parts.append((pieces, layer.label[source], layer.call[source], likely))
        free = intersection(free, complement(union(pieces), begin, end)) if len(pieces) else free
    rest = np.full(len(free), -1, dtype=np.int64)
    parts.append((free, np.full(len(free), ISSUING, dtype=np.int64), rest, np.zeros(len(free), dtype=np.bool_)))
    times = np.concatenate([part[0] for part in parts])
    order = np.argsort(times[:, 0], kind="stable")
    label, call, likely = (np.concatenate([part[i] for part in parts])[order] for i in (1, 2, 3))
    return HostLine(times[order, 0], times[order, 1], label, call, likely)


def _layer(times: Intervals, label: int, call: int = -1, *, likely: bool = False) -> _Layer:
    size = len(times)
    return _Layer(times[:, 0], times[:, 1], np.full(size, label), np.full(size, call), likely)


def _overhead(timeline: Timeline, pattern: re.Pattern[str], label: int) -> _Layer:
    rows = names_matching(timeline, pattern)[timeline.overhead.name]
    return _layer(union(np.column_stack((timeline.overhead.begin[rows], timeline.overhead.end[rows]))), label)


def _labelled(timeline: Timeline, of_call: Ints, mine: Flags, *, likely: bool = False) -> _Layer:
    rows = np.flatnonzero(mine & (of_call != NO_CAUSE))
    return _Layer(timeline.calls.begin[rows], timeline.calls.end[rows], of_call[rows], rows, likely)


def _after_drain(window: Window, of_call: Ints, mine: Flags, launched: Ints) -> _Layer:
    """From the end of a call that drained the queues to the end of the next launch: the call's doing too."""
    calls, work = window.timeline.calls, window.timeline.work
    rows = np.flatnonzero(mine & (of_call != NO_CAUSE))
    # only the devices that this thread feeds: another device's queue says nothing about them
    fed = np.unique(work.device[(work.call >= 0) & mine[np.maximum(work.call, 0)]]) if len(calls) else work.device
    here = np.isin(work.device, fed)
    issued = np.sort(np.where(work.call >= 0, calls.end[work.call], work.begin)[here]) if len(calls) else work.begin
    # by the clocks, the last operation may end a little after the call that waited for it
    num_issued = np.searchsorted(issued, calls.end[rows], side="right")
    num_ended = np.searchsorted(np.sort(work.end[here]), calls.end[rows] + _DRAIN_NS, side="right")
    rows = rows[num_ended >= num_issued]
    launches = np.unique(launched[mine[launched]])
    following = np.searchsorted(calls.begin[launches], calls.end[rows], side="left")
    known = following < len(launches)
    rows, following = rows[known], following[known]
    return _Layer(calls.end[rows], calls.end[launches[following]], of_call[rows], rows)


def _loading(timeline: Timeline, of_call: Ints, launched: Ints, mine: Flags, op_mine: Flags) -> _Layer:
    shown = names_matching(timeline, LOADING)[timeline.overhead.name]
    if shown.any():
        return _layer(loading_times(timeline, launched, mine, op_mine), CODE["lazy_load"])
    return _layer(slow_first_launches(timeline, of_call, mine), CODE["lazy_load"], likely=True)


def _gaps(window: Window, cover: dict[int, Intervals], launch_time: dict[int, Intervals], mine: int) -> list[_Layer]:
    """Long gaps of a thread: the host busy elsewhere, unless another thread launches meanwhile."""
    gaps = complement(cover[mine], window.begin, window.end)
    gaps = gaps[gaps[:, 1] - gaps[:, 0] >= LONG_GAP_NS]
    others = [times for code, times in launch_time.items() if code != mine]
    elsewhere = union(np.concatenate(others)) if others else EMPTY
    alone = _not_in(gaps, elsewhere, window)
    alone = alone[alone[:, 1] - alone[:, 0] >= LONG_GAP_NS]
    layers = [_layer(alone, CODE["host_busy"])]
    for code, times in launch_time.items():
        if code != mine and _alternate(times, launch_time[mine]):
            layers.append(_layer(intersection(gaps, times), CODE["gil"], likely=True))
    return layers


def _not_in(times: Intervals, other: Intervals, window: Window) -> Intervals:
    return intersection(times, complement(other, window.begin, window.end))


def _alternate(one: Intervals, other: Intervals) -> bool:
    """Return whether two threads' launching times take turns often, as threads that share an interpreter do."""
    if len(one) < 8 or len(other) < 8:
        return False
    who = np.concatenate((np.zeros(len(one)), np.ones(len(other))))
    order = np.argsort(np.concatenate((one[:, 0], other[:, 0])), kind="stable")
    switches = int(np.abs(np.diff(who[order])).sum())
    return switches > 0.5 * min(len(one), len(other))


def _cover(timeline: Timeline, merged: Ints, code: int) -> Intervals:
    """Return the times in which a logical thread was in an operator or a call."""
    calls, ops = timeline.calls, timeline.ops
    row, op_row = merged[calls.thread] == code, (merged[ops.thread] == code) & (ops.parent < 0)
    begin = np.concatenate((calls.begin[row], ops.begin[op_row]))
    return union(np.column_stack((begin, np.concatenate((calls.end[row], ops.end[op_row])))))


def _launch_time(timeline: Timeline, launched: Ints, merged: Ints, code: int) -> Intervals:
    """Return the times in which a logical thread launched; pauses under half a long gap count as launching."""
    calls = timeline.calls
    rows = launched[merged[calls.thread[launched]] == code]
    pause = LONG_GAP_NS // 4
    return union(np.column_stack((calls.begin[rows] - pause, calls.end[rows] + pause)))


def _logical_threads(timeline: Timeline) -> Ints:
    """Return, for each thread code, the thread it works for.

    `backward()` holds its caller until autograd's thread has launched everything, so the two are one line of work:
    an engine thread belongs to the thread that stands still while it works.
    """
    calls, ops = timeline.calls, timeline.ops
    top = int(max(calls.thread.max(initial=0), ops.thread.max(initial=0), len(timeline.threads)))
    same = np.arange(top + 1)
    merged = same.copy()
    engines = np.unique(calls.thread[calls.engine])
    rows = np.bincount(np.concatenate((calls.thread, ops.thread)), minlength=top + 1)
    rows[engines] = 0
    # the one that launches forwards has many; threads of loaders and loggers can be hundreds
    candidates = [code for code in np.argsort(-rows, kind="stable")[:_MOST_CALLERS].tolist() if rows[code]]
    covers = {code: _cover(timeline, same, code) for code in candidates}
    for engine in engines.tolist():
        times = _cover(timeline, same, engine)
        still = [code for code in candidates if length(intersection(times, covers[code])) <= 0.2 * length(times)]
        if still:
            merged[engine] = max(still, key=lambda code: length(covers[code]))
    return merged


def held_by(line: HostLine, begin: Ints, end: Ints) -> tuple[Ints, Ints, Intervals]:
    """Return every overlap of moments with a thread's labelled times; see `intervals.overlaps`."""
    return overlaps(begin, end, np.column_stack((line.begin, line.end)))
