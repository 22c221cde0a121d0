"""Interval arithmetic, the drawing of lanes and the sharing of losses against their plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
from build import Builder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchweave.diagnose.blame import blame
from torchweave.diagnose.overlap import numbers, stream_numbers
from torchweave.diagnose.peers import estimate_late
from torchweave.diagnose.scale import _settle, lost_cost
from torchweave.diagnose.sides import choose_sides
from torchweave.diagnose.window import look_at
from torchweave.intervals import complement, length, overlaps, union
from torchweave.reporting.strip import shares
from torchweave.trace.read import read

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def points(rows) -> set[int]:
    return {point for begin, end in rows for point in range(begin, end)}


@given(intervals, intervals)
def test_overlaps_are_all_pairs_that_overlap(some, others):
    other = union(others)
    array = np.array(some, dtype=np.int64).reshape(-1, 2)
    mine, theirs, both = overlaps(array[:, 0], array[:, 1], other)
    found = {(int(a), int(b)): tuple(row) for a, b, row in zip(mine, theirs, both.tolist(), strict=True)}
    expected = {}
    for row, (begin, end) in enumerate(some):
        for column, (low, high) in enumerate(other.tolist()):
            if max(begin, low) < min(end, high):
                expected[row, column] = (max(begin, low), min(end, high))
    assert found == expected


@given(intervals, st.integers(-5, 30), st.integers(30, 70))
def test_a_complement_is_what_is_left(some, begin, end):
    assert points(complement(union(some), begin, end).tolist()) == set(range(begin, end)) - points(some)


@given(intervals, st.integers(1, 25))
def test_shares_of_columns(some, width):
    array = np.array([row for row in some if row[0] <= row[1]], dtype=np.int64).reshape(-1, 2)
    found = shares(array, 60, width)
    edges = np.linspace(0, 60, width + 1)
    covered = union(array)
    for column in range(width):
        low, high = edges[column], edges[column + 1]
        inside = sum(max(0.0, min(high, end) - max(low, begin)) for begin, end in covered.tolist())
        assert found[column] == pytest.approx(inside / (high - low), abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=20))
def test_turns_take_all_that_they_have_room_for(turns):
    loss, room = (np.array(column) for column in zip(*turns, strict=True))
    taken = _settle(loss, room)
    assert (taken <= room + 1e-6).all()
    assert taken.sum() == pytest.approx(min(loss.sum(), room.sum()), abs=1e-6)


operations = st.lists(
    st.tuples(st.sampled_from([7, 13, 20]), st.integers(0, 400), st.integers(20, 300), st.integers(0, 900)),
    min_size=4,
    max_size=40,
)


@given(rows=operations)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_moment_is_charged_once_whatever_ran(rows, tmp_path):
    build = Builder()
    free = {7: 0.0, 13: 0.0, 20: 0.0}
    for row, (stream, late, size, ahead) in enumerate(rows):
        begin = max(free[stream], 100.0 * row) + late
        free[stream] = begin + size
        build.kernel(stream, begin - ahead, begin, size)
        if late % 3 == 0:
            build.wait(stream, begin - ahead - 5)
    window = look_at(read(build.write(tmp_path / "any.json")))
    sides = choose_sides(window)
    if not sides.two:
        return
    found = numbers(window, sides, stream_numbers(window))
    charges = blame(window, sides, estimate_late(window))
    time = (charges.end - charges.begin).astype(np.float64)
    assert (time > 0).all()
    for lost in (True, False):
        some = charges.take(charges.lost == lost)
        each = [(int(begin), int(end)) for begin, end in zip(some.begin, some.end, strict=True)]
        by_pending = {}
        for pending, interval in zip(some.pending.tolist(), each, strict=True):
            by_pending.setdefault(sides.side[pending] if lost else 0, []).append(interval)
        for intervals_of_one in by_pending.values():
            assert length(union(intervals_of_one)) == sum(end - begin for begin, end in intervals_of_one)
    assert time[~charges.lost].sum() == pytest.approx(found.idle_ms * 1e6, abs=1)
    if charges.lost.any():
        cost = lost_cost(window, sides, charges.take(charges.lost))
        assert cost.sum() == pytest.approx(found.lost_ms * 1e6, rel=1e-6)
