"""Joins: device operations to launch calls by correlation, calls to operators by the recorder's number or by time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from torchweave.trace.timeline import Flags, Ints

# A launch may begin a little before the operator's own row does, by the recorder's clock.
_SLACK_NS = 2_000


def rows_of(keys: Ints, table: Ints) -> Ints:
    """Return, for each key, the row of the table that holds it, -1 for none; keys below 0 match nothing."""
    if len(table) == 0 or len(keys) == 0:
        return np.full(len(keys), -1, dtype=np.int64)
    order = np.argsort(table, kind="stable")
    at = np.minimum(np.searchsorted(table[order], keys), len(table) - 1)
    found: Ints = order[at].astype(np.int64)
    found[(table[found] != keys) | (keys < 0)] = -1
    return found


def nest(begin: Ints, end: Ints, thread: Ints) -> Ints:
    """Return the row of the interval around each one on its own thread, -1 for the outermost.

    Args:
        begin: Starts, sorted by thread, then begin, longer ones first.
        end: Ends.
        thread: Codes of threads.
    """
    size = len(begin)
    parent = np.full(size, -1, dtype=np.int64)
    if size == 0:
        return parent
    # an interval's depth is how many began before it and have not ended; one without length does not end itself
    ends = np.maximum(end, begin + 1)
    low, stride = int(begin.min()), int(ends.max()) - int(begin.min()) + 1
    opened, closed = _keys(thread, begin - low, stride), np.sort(_keys(thread, ends - low, stride))
    depth = np.arange(size) - np.searchsorted(closed, opened, side="right")
    # its parent is the last one before it that is one less deep: go level by level
    order = np.argsort(depth, kind="stable")
    levels = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1)
    for above, rows in pairwise(levels):
        parent[rows] = above[np.maximum(np.searchsorted(above, rows) - 1, 0)]
    # rows that overlap without nesting, as damaged traces hold them, have no parent
    row = np.maximum(parent, 0)
    holds = (parent >= 0) & (thread[row] == thread) & (begin[row] <= begin) & (ends[row] > begin)
    return np.where(holds, parent, -1)


def innermost(at: Ints, thread: Ints, begin: Ints, end: Ints, of_thread: Ints, parent: Ints) -> Ints:
    """Return the innermost interval of a thread's nest that holds each moment, -1 for none.

    Args:
        at: Moments, ns.
        thread: The thread of each.
        begin: Starts of the nest, sorted by thread, then begin.
        end: Its ends.
        of_thread: Its threads.
        parent: What `nest` returned for it.
    """
    if len(begin) == 0 or len(at) == 0:
        return np.full(len(at), -1, dtype=np.int64)
    found = _last_begun(at, thread, begin, of_thread)
    same = (found >= 0) & (of_thread[np.maximum(found, 0)] == thread)
    found = np.where(same, found, -1)
    # climb out of intervals that have ended already; nests are some tens deep at most
    while True:
        over = (found >= 0) & (end[np.maximum(found, 0)] <= at)
        if not over.any():
            return found
        found = np.where(over, parent[np.maximum(found, 0)], found)


def _last_begun(at: Ints, thread: Ints, begin: Ints, of_thread: Ints) -> Ints:
    """Return the last row that begins at or before each moment on its thread (or a row of another thread)."""
    low = int(min(begin.min(), at.min()))
    # one sortable key of thread and time: both fit, since times span less than 2**43 us
    stride = int(max(begin.max(), at.max())) - low + 1
    keys, wanted = _keys(of_thread, begin - low, stride), _keys(thread, at - low, stride)
    found: Ints = (np.searchsorted(keys, wanted, side="right") - 1).astype(np.int64)
    return found


def _keys(thread: Ints, time: Ints, stride: int) -> Ints:
    top = int(thread.max(initial=0)) + 1
    if stride <= (2**62) // (top + 1):
        return thread * stride + time
    # days of trace on very many threads: coarser times would mix rows, so fall back to Python's integers
    coarse: Ints = (thread.astype(object) * stride + time.astype(object)).astype(object)
    return coarse


def operators_of(
    begin: Ints,
    thread: Ints,
    external: Ints,
    ops: tuple[Ints, Ints, Ints, Ints, Ints],
) -> Ints:
    """Return the innermost operator around each call.

    By the recorder's number first, and only where that operator was running at the time (old traces give every
    row its correlation as that number); by thread and time else, since numbers can be missing.

    Args:
        begin: Starts of the calls, ns.
        thread: Their threads.
        external: Their numbers of operators.
        ops: Begin, end, thread, external and parent columns of the operators.
    """
    op_begin, op_end, op_thread, op_external, op_parent = ops
    by_number = rows_of(external, op_external)
    row = np.maximum(by_number, 0)
    if len(op_begin):
        running = (op_begin[row] <= begin + _SLACK_NS) & (begin <= op_end[row] + _SLACK_NS)
        by_number = np.where(running, by_number, -1)
    by_time = innermost(begin, thread, op_begin, op_end, op_thread, op_parent)
    return np.where(by_number >= 0, by_number, by_time)


def under(flag: Flags, parent: Ints) -> Flags:
    """Return which rows carry a flag themselves or lie under one that does; parents come before children."""
    result = flag.copy()
    up = parent.copy()
    while (up >= 0).any():
        result |= (up >= 0) & flag[np.maximum(up, 0)]
        up = np.where(up >= 0, parent[np.maximum(up, 0)], -1)
    return result


def outermost(rows: Ints, parent: Ints) -> Ints:
    """Return the outermost interval around each row, -1 for -1."""
    found = rows.copy()
    while True:
        up = np.where(found >= 0, parent[np.maximum(found, 0)], -1)
        if not (up >= 0).any():
            return found
        found = np.where(up >= 0, up, found)
