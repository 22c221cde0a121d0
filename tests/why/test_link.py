"""Joins against their plain definition: nesting, the innermost operator, outermost ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchweave.trace import link


@st.composite
def nests(draw):
    """Intervals of two threads that nest properly, sorted as tables are."""
    rows = []

    def fill(thread: int, low: int, high: int, depth: int) -> None:
        at = low
        while at < high and depth < 5 and draw(st.booleans()):
            begin = draw(st.integers(at, high))
            end = draw(st.integers(begin, high))
            rows.append((thread, begin, end))
            fill(thread, begin, end, depth + 1)
            at = end + 1

    for thread in range(2):
        fill(thread, -50, 50, 0)
    rows.sort(key=lambda row: (row[0], row[1], -row[2]))
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def plain_parents(thread, begin, end):
    parents = []
    for row in range(len(begin)):
        holding = [
            other
            for other in range(row)
            if thread[other] == thread[row]
            and begin[other] <= begin[row]
            and max(end[other], begin[other] + 1) > begin[row]
        ]
        parents.append(holding[-1] if holding else -1)
    return parents


@given(nests())
def test_the_parent_is_the_innermost_interval_around(table):
    thread, begin, end = table
    assert link.nest(begin, end, thread).tolist() == plain_parents(thread, begin, end)


@given(nests(), st.integers(-60, 60), st.integers(0, 1))
def test_the_innermost_interval_at_a_moment(table, at, on):
    thread, begin, end = table
    parent = link.nest(begin, end, thread)
    found = link.innermost(np.array([at]), np.array([on]), begin, end, thread, parent)[0]
    holding = [row for row in range(len(begin)) if thread[row] == on and begin[row] <= at < end[row]]
    assert found == (holding[-1] if holding else -1)


@given(st.lists(st.integers(-1, 8), max_size=12, unique=True), st.lists(st.integers(-3, 10), max_size=12))
def test_rows_of_keys(table, keys):
    found = link.rows_of(np.array(keys, dtype=np.int64), np.array(table, dtype=np.int64))
    assert found.tolist() == [table.index(key) if key >= 0 and key in table else -1 for key in keys]
