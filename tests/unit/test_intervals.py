"""Interval arithmetic against the plain definition: which integer instants lie in the set."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchweave.intervals import difference, intersection, length, union

raw = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def instants(intervals):
    return {t for begin, end in intervals for t in range(begin, end)}


@given(raw)
def test_union_keeps_every_instant_and_is_sorted_and_disjoint(items):
    result = union(items)
    assert instants(result.tolist()) == instants(items)
    assert (result[:, 0] < result[:, 1]).all()
    assert (result[1:, 0] > result[:-1, 1]).all()
    assert length(result) == len(instants(items))


@given(raw, raw)
def test_intersection_and_difference_are_those_of_sets(one, two):
    a, b = union(one), union(two)
    assert instants(intersection(a, b).tolist()) == instants(one) & instants(two)
    assert instants(difference(a, b).tolist()) == instants(one) - instants(two)


def test_large_times_stay_exact():
    begin = 1_700_000_000_000_000_001
    assert length(union(np.array([[begin, begin + 1]]))) == 1
