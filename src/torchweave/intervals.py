"""Union, intersection and difference of sorted half-open intervals, in integer nanoseconds.

A set of intervals is an int64 array of shape (n, 2): begin and end, sorted, disjoint, none empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Intervals: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]

EMPTY: Intervals = np.zeros((0, 2), dtype=np.int64)
EMPTY.setflags(write=False)


def union(intervals: npt.ArrayLike) -> Intervals:
    """Return the union of any intervals, overlapping or not, in any order.

    Args:
        intervals: Begin and end of each, shape (n, 2), ns; empty and reversed ones count as nothing.

    Returns:
        Sorted disjoint intervals, shape (m, 2), int64 ns; touching ones are joined.
    """
    array = np.asarray(intervals, dtype=np.int64).reshape(-1, 2)
    array = array[array[:, 1] > array[:, 0]]
    if len(array) == 0:
        return EMPTY
    array = array[np.argsort(array[:, 0], kind="stable")]
    reach = np.maximum.accumulate(array[:, 1])
    # a new interval begins where a begin lies beyond everything before it
    first = np.concatenate(([True], array[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.column_stack((array[first, 0], reach[last]))


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the times that lie in both sets."""
    return _sweep(a, b, lambda in_a, in_b: in_a & in_b)


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Return the times that lie in `a` and not in `b`."""
    return _sweep(a, b, lambda in_a, in_b: in_a & ~in_b)


def complement(intervals: Intervals, begin: int, end: int) -> Intervals:
    """Return the times between `begin` and `end` that lie in no interval of the set."""
    return difference(union([(begin, end)]), intervals)


def overlaps(
    begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64], other: Intervals
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Intervals]:
    """Return every overlap of any intervals with a set.

    Args:
        begin: Begins of any intervals, in any order, ns.
        end: Their ends.
        other: A set.

    Returns:
        For each overlap: the row of the interval, the row in the set, and the overlap itself (shape (n, 2)); by
        row of the interval, then by time.
    """
    low = np.searchsorted(other[:, 1], begin, side="right")
    high = np.searchsorted(other[:, 0], end, side="left")
    count = np.where(end > begin, np.maximum(high - low, 0), 0)
    mine = np.repeat(np.arange(len(begin), dtype=np.int64), count)
    first = np.cumsum(count) - count
    theirs = (np.arange(len(mine), dtype=np.int64) - first[mine] + low[mine]).astype(np.int64)
    both = np.column_stack((np.maximum(begin[mine], other[theirs, 0]), np.minimum(end[mine], other[theirs, 1])))
    return mine, theirs, both


def length(intervals: Intervals) -> int:
    """Return the total length in ns."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def _sweep(a: Intervals, b: Intervals, keep: Callable[[_Mask, _Mask], _Mask]) -> Intervals:
    """Cut time at every border of both sets and keep the pieces that `keep` wants."""
    borders = np.unique(np.concatenate((a.ravel(), b.ravel())))
    if len(borders) < 2:
        return EMPTY
    pieces = np.column_stack((borders[:-1], borders[1:]))
    return union(pieces[keep(_covers(a, borders), _covers(b, borders))])


def _covers(intervals: Intervals, borders: npt.NDArray[np.int64]) -> _Mask:
    """Return, for each piece between two borders, whether the set covers it."""
    if len(intervals) == 0:
        return np.zeros(len(borders) - 1, dtype=np.bool_)
    at = np.searchsorted(intervals[:, 0], borders[:-1], side="right") - 1
    covered: _Mask = (at >= 0) & (borders[:-1] < intervals[np.maximum(at, 0), 1])
    return covered
