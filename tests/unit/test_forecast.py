"""What a pair takes in an order of turns, and the search for the best order: on numbers alone."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from torchweave.engine.forecast import (
    Segment,
    alternating,
    away,
    before,
    best_order,
    bound_us,
    kept_in,
    segments_of,
    span_us,
    wire,
)
from torchweave.engine.order import ALTERNATING, REGION, WAIT, Kept, woven
from torchweave.engine.reorder import better_order, is_worth_it, together

END = -2
GROUPS = {"world": (0, 1)}


def strand(*parts, last=0):
    """Segments that each end with waiting for the one operation that they start: (work, link, work after it)."""
    made = [Segment(((work, link),), rest, at, place=2 * at + 1) for at, (work, link, rest) in enumerate(parts)]
    return (*made, Segment((), last, END))


def record_of(num_crossings):
    """The record that goes with `strand`."""
    return tuple(step for at in range(num_crossings) for step in (("op", "world"), (WAIT, at)))


times = st.integers(0, 50)
strands = st.lists(st.tuples(times, times, times), min_size=1, max_size=4).flatmap(
    lambda parts: times.map(lambda last: strand(*parts, last=last))
)


def orders(backward, forward):
    """Every order in which the backward has the first turn."""
    length = len(backward) + len(forward)
    for places in itertools.combinations(range(1, length), len(backward) - 1):
        yield "".join("B" if at == 0 or at in places else "F" for at in range(length))


@given(strands, strands)
@settings(max_examples=60, deadline=None)
def test_no_order_is_better_than_the_best(backward, forward):
    """Catches a search that gives up an order too early, or models a segment otherwise than the forecast."""
    best = best_order(backward, forward)
    assert span_us(backward, forward, best) == min(
        span_us(backward, forward, order) for order in orders(backward, forward)
    )


@given(strands, strands)
@settings(max_examples=60, deadline=None)
def test_no_order_beats_the_bound(backward, forward):
    """Catches work or communication that the model loses."""
    best = span_us(backward, forward, best_order(backward, forward))
    one_by_one = span_us(backward, forward, "B" * len(backward) + "F" * len(forward))
    assert bound_us(backward, forward) <= best <= one_by_one


def test_alternating_hides_what_stands_opposite():
    """Catches a forecast in which communication holds the lane that computes."""
    backward, forward = strand((1, 9, 0), (9, 9, 0), last=9), strand((12, 9, 0), (12, 9, 0), last=12)
    assert span_us(backward, forward, "BFBFBF") == 1 + 9 + 9 + 3 * 12
    assert span_us(backward, forward, "BBBFFF") == 1 + 9 + 9 + 3 * 12 + 4 * 9


def test_the_link_carries_one_operation_after_another():
    """Catches two operations on the link at once."""
    backward, forward = strand((1, 10, 0), last=5), strand((1, 10, 0), last=5)
    assert span_us(backward, forward, "BFBF") == 1 + 10 + 10 + 5


def test_weight_gradients_hide_their_own_strands_communication():
    """Catches work after an operation's start that is taken for work before it."""
    assert span_us(strand((3, 10, 8), last=2), strand((0, 0, 0)), "BBFF") == 3 + 10 + 2


def test_a_strand_with_short_crossings_runs_several_segments_in_one_turn():
    """Catches alternating where half of one strand's communication then has nothing to hide it."""
    layer = [(10, 1, 0), (1, 10, 0), (10, 10, 0)]
    backward, forward = strand(*[(10, 10, 0)] * 6, last=10), strand(*layer * 3, last=10)
    best = best_order(backward, forward)
    plain = alternating(len(backward), len(forward))
    assert plain == "BFBFBFBFBFBFBFFFF"
    assert "FF" in best
    assert span_us(backward, forward, best) < 0.85 * span_us(backward, forward, plain)


def test_where_no_order_is_better_the_strands_alternate():
    """Catches an order that is changed for nothing."""
    even = strand(*[(10, 5, 0)] * 4, last=10)
    assert best_order(even, even) == "BF" * 5
    assert kept_in("BF" * 5, even, even) == ALTERNATING


def test_the_search_is_small():
    """Catches a search that grows with the number of orders: here they are more than there are atoms."""
    many = strand(*[(10, 9, 1)] * 48, last=3)
    more = strand(*[(7, 9, 1), (1, 2, 0)] * 40, last=3)
    best = best_order(many, more)
    assert span_us(many, more, best) < span_us(many, more, alternating(len(many), len(more)))


def taken(backward, forward, order):
    """The strands of the issues in an order, worked out from the order alone."""
    at, found = {"B": 0, "F": 0}, []
    both = {"B": backward, "F": forward}
    for letter in order:
        found += letter * len(both[letter][at[letter]].issues)
        at[letter] += 1
    return "".join(found)


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_woven_order_is_the_one_that_was_searched(num_backward, num_forward, random):
    """Catches turns that are taken elsewhere than where the order has them."""
    backward, forward = strand(*[(1, 1, 0)] * num_backward), strand(*[(1, 1, 0)] * num_forward)
    order = random.choice(list(orders(backward, forward)))
    kept = kept_in(order, backward, forward)
    actions = woven(record_of(num_backward), record_of(num_forward), kept)
    issued = "".join("B" if action.serial < num_backward else "F" for action in actions if action.channel)
    assert issued == taken(backward, forward, order)


RECORD = (("op", "world"), ("op", "world"), (WAIT, 0), (REGION, 0), (WAIT, 1), (WAIT, -1))
TIMES = {
    before("forward", 0): 1,
    wire("forward", 0): 10,
    before("forward", 1): 2,
    wire("forward", 1): 20,
    before("forward", 2): 3,
    before("forward", 3): 4,
    away("forward", 3): 7,
    before("forward", 4): 5,
    before("forward", 5): 6,
    away("forward", 5): 8,
    before("forward", 6): 9,
}


def test_a_record_is_cut_at_its_waits():
    """Catches an operation that is waited for late and loses its end, and a region that counts as one on the link."""
    segments = segments_of(RECORD, TIMES, "forward")
    assert segments == (
        Segment(((1, 10), (2, 20)), 3, 0, place=2),
        Segment((), 4, -1, 7, 3),
        Segment((), 5, 1, place=4),
        Segment((), 6, -1, 8, 5),
        Segment((), 9, END),
    )
    # 6 of work, an operation that ends at 11, 4 of work, 7 away; the second one ends at 31, and 20 remain
    assert span_us((Segment((), 0, END),), segments, "BFFFFF") == 31 + 6 + 8 + 9


def by_rank(*changes):
    return {rank: {**TIMES, **change} for rank, change in enumerate(changes)}


def test_ranks_take_the_slowest_work_and_the_shortest_transfer():
    """Catches a rank's waiting for a late one that is taken for the link's time."""
    name, link = before("forward", 0), wire("forward", 0)
    times_us, why_not = together(by_rank({name: 5.4, link: 400.0}, {name: 50.6, link: 30.2}))
    assert why_not == ""
    assert (times_us[name], times_us[link]) == (51, 30)


def test_ranks_with_other_steps_or_none_keep_the_alternating_order():
    """Catches a search in times that do not belong to each other."""
    assert together(by_rank({}, {before("backward", 9): 1.0}))[1] == "the ranks' strands have different steps"
    assert "did not come to its end" in together({0: dict(TIMES), 1: {}})[1]


def test_an_order_is_changed_only_for_a_gain_that_is_no_noise():
    """Catches another order for less than a hundredth, and one that is not said in numbers."""
    backward, forward = record_of(3), record_of(5)

    def measured(takes_us):
        names = {"backward": backward, "forward": forward}
        found = {before(name, at): 100 * (at % 2 == 0) for name, steps in names.items() for at in range(len(steps) + 1)}
        return found | {wire(name, at): takes_us for name, steps in names.items() for at in range(0, len(steps), 2)}

    kept, told, why_not = better_order(backward, forward, measured(0))
    assert (kept, told, why_not) == (ALTERNATING, "", "no order is better than alternating (1.00 ms) by 1%")
    short = measured(90) | {wire("forward", at): 0 for at in (2, 6)}
    kept, told, why_not = better_order(backward, forward, short)
    assert why_not == ""
    assert kept != ALTERNATING
    assert isinstance(kept, Kept)
    assert "is predicted to take" in told


def test_a_search_needs_something_to_choose_from():
    """Catches a measured pair where every order is the same."""
    assert not is_worth_it(record_of(1), record_of(1))
    assert not is_worth_it((), record_of(5))
    assert is_worth_it(record_of(1), record_of(2))
    assert is_worth_it(((REGION, 0),), record_of(2))
