"""Times in which a kernel's module was loaded, from the recorder's rows or from how long first launches took."""

from __future__ import annotations

import re

import numpy as np

from torchweave.diagnose.calls import NO_CAUSE, names_matching
from torchweave.intervals import Intervals, overlaps, union
from torchweave.trace import link
from torchweave.trace.timeline import KERNEL, Flags, Ints, Timeline

LOADING = re.compile(r"Loading", re.IGNORECASE)

# Without the recorder's rows: a first launch is slow if it took this long, and this many times the usual.
_SLOW_NS, _TIMES_USUAL = 500_000, 20


def loading_times(timeline: Timeline, launched: Ints, mine: Flags, op_mine: Flags) -> Intervals:
    """Return the times of operators up to a launch, where a loading row lies in them; a thread's calls alone else.

    The rows themselves cover only a small part of it.

    Args:
        timeline: The trace.
        launched: Rows of the launch calls.
        mine: Which calls are the thread's.
        op_mine: Which operators are.
    """
    calls, ops, overhead = timeline.calls, timeline.ops, timeline.overhead
    loads = overhead.begin[names_matching(timeline, LOADING)[overhead.name]]
    top = np.flatnonzero(op_mine & (ops.parent < 0))
    top = top[np.argsort(ops.begin[top], kind="stable")]
    inside = _holding(loads, ops.begin[top], ops.end[top])
    launches = np.unique(launched[mine[launched]])
    known = inside >= 0
    op = top[inside[known]]
    following = np.searchsorted(calls.end[launches], loads[known])
    ends = np.append(calls.end[launches], np.iinfo(np.int64).max)[following]
    # an operator can load and never launch
    times = np.column_stack((ops.begin[op], np.minimum(ends, ops.end[op])))
    rows = np.flatnonzero(mine)
    at = _holding(loads[~known], calls.begin[rows], calls.end[rows])
    held = rows[at[at >= 0]]
    return union(np.concatenate((times, np.column_stack((calls.begin[held], calls.end[held])))))


def slow_first_launches(timeline: Timeline, of_call: Ints, mine: Flags) -> Intervals:
    """Return the times before a kernel name's first launch that took far longer than launches do.

    The time of an operator before a launch begins at the operator's begin, or at the launch before it in the same
    operator; what its calls are charged for otherwise does not count.
    """
    work, calls = timeline.work, timeline.calls
    rows = np.flatnonzero((work.call >= 0) & (work.kind == KERNEL))
    if len(rows) == 0:
        return union([])
    rows = rows[np.argsort(work.call[rows], kind="stable")]
    call, end = work.call[rows], calls.end[work.call[rows]]
    begin = _begins(timeline, call)
    took = end - begin
    charged = np.flatnonzero(of_call != NO_CAUSE)
    row, _, both = overlaps(begin, end, union(np.column_stack((calls.begin[charged], calls.end[charged]))))
    took = took - np.bincount(row, weights=both[:, 1] - both[:, 0], minlength=len(took)).astype(np.int64)
    _, first = np.unique(work.name[rows], return_index=True)
    slow = first[took[first] > max(_SLOW_NS, _TIMES_USUAL * float(np.median(took)))]
    # the trace's very first launch pays for the recorder's start
    slow = slow[(slow > 0) & mine[call[slow]]]
    return union(np.column_stack((begin[slow], end[slow])))


def _begins(timeline: Timeline, call: Ints) -> Ints:
    """Return when the host began with each launch: with its operator, or after the launch before it in there."""
    calls, ops = timeline.calls, timeline.ops
    if len(ops) == 0:
        return calls.begin[call]
    top = link.outermost(calls.op[call], ops.parent)
    begin = np.where(top >= 0, ops.begin[np.maximum(top, 0)], calls.begin[call])
    order = np.lexsort((calls.begin[call], calls.thread[call]))
    same = calls.thread[call[order[1:]]] == calls.thread[call[order[:-1]]]
    before = np.full(len(call), np.iinfo(np.int64).min)
    before[order[1:][same]] = calls.end[call[order[:-1][same]]]
    return np.asarray(np.minimum(np.maximum(begin, before), calls.begin[call]), dtype=np.int64)


def _holding(at: Ints, begin: Ints, end: Ints) -> Ints:
    """Return the row, of sorted intervals, that holds each moment, -1 for none."""
    if len(begin) == 0:
        return np.full(len(at), -1, dtype=np.int64)
    row = np.searchsorted(begin, at, side="right") - 1
    return np.where((row >= 0) & (at <= end[np.maximum(row, 0)]), row, -1).astype(np.int64)
