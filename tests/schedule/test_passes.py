"""Passes keep what they do not change, undo each other, and order transfers so that nothing blocks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweave.schedule.action import COMPUTE, P2P, PAIR, RECEIVES, SENDS
from torchweave.schedule.build import build, names
from torchweave.schedule.passes import (
    add_reduce_grad,
    add_send_recv,
    merge_backward,
    merge_pairs,
    only_compute,
    split_backward,
    take_pairs_apart,
)
from torchweave.schedule.transfers import transfer_of

plans = st.builds(
    lambda name, half, rounds: build(name, 2 * half, 4 * half * rounds),
    st.sampled_from(names()),
    st.integers(1, 3),
    st.integers(1, 3),
)


@given(plans)
def test_splitting_and_merging_backwards_undo_each_other(plan):
    whole = merge_backward(plan)
    assert merge_backward(split_backward(whole)) == whole
    assert not any(action.kind == "B" for row in split_backward(plan).ranks for action in row)


@given(plans)
def test_pairs_taken_apart_are_the_forward_and_then_the_backward(plan):
    apart = take_pairs_apart(plan)
    assert all(action.kind != PAIR for row in apart.ranks for action in row)
    assert [leaf for row in plan.ranks for action in row for leaf in action.leaves()] == [
        action for row in apart.ranks for action in row
    ]


@given(plans)
def test_merging_pairs_keeps_every_action_and_can_still_send(plan):
    # catches a pair that waits for one half while the other is waited for
    merged = merge_pairs(plan)
    for before, after in zip(plan.ranks, merged.ranks, strict=True):
        leaves = [Counter(leaf for action in row for leaf in action.leaves()) for row in (before, after)]
        assert leaves[0] == leaves[1]
    add_send_recv(merged)


def test_merging_pairs_makes_pairs_of_what_interleaved_has_side_by_side():
    merged = merge_pairs(build("interleaved", 4, 8))
    assert sum(action.kind == PAIR for row in merged.ranks for action in row) > 20


@given(plans)
def test_transfers_of_two_ranks_have_one_order_and_every_input_is_received_before_it_is_used(plan):
    sent = add_send_recv(add_reduce_grad(plan))
    assert only_compute(sent) == plan
    order = [{}, {}]
    for rank, row in enumerate(sent.ranks):
        for action in row:
            if action.kind in P2P:
                step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
                peer = sent.rank_of(action.stage + step, action.microbatch)
                name = (action.kind[-1], min(action.stage, action.stage + step), action.microbatch)
                order[action.kind in SENDS].setdefault((rank, peer), []).append(name)
    # what one rank sends to another arrives in the order in which that one receives from it
    sends, receives = order[1], order[0]
    assert {(b, a): row for (a, b), row in sends.items()} == receives
    for row in sent.ranks:
        got = set()
        for action in row:
            if action.kind in RECEIVES:
                got.add((action.kind, action.stage, action.microbatch))
            for leaf in action.leaves() if action.kind in COMPUTE else ():
                before = {"F": (-1, "RECV_F"), "B": (1, "RECV_B"), "I": (1, "RECV_B")}.get(leaf.kind)
                if before and 0 <= leaf.stage + before[0] < plan.num_stages:
                    local = plan.rank_of(leaf.stage + before[0], leaf.microbatch) == plan.rank_of(
                        leaf.stage, leaf.microbatch
                    )
                    assert local or (before[1], leaf.stage, leaf.microbatch) in got


@given(plans)
def test_transfers_have_one_order_over_all_ranks(plan):
    # rendezvous: a send ends only when its receive has begun, and the other way round
    sent = add_send_recv(plan)
    rows = [[action for action in row if action.kind in P2P] for row in sent.ranks]
    places = [0] * len(rows)
    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        heads = {
            row[place]: rank for rank, (row, place) in enumerate(zip(rows, places, strict=True)) if place < len(row)
        }
        moved = False
        for action, rank in heads.items():
            if action.kind in SENDS:
                leaf = action._replace(kind="F" if action.kind == "SEND_F" else "B")
                transfer = transfer_of(leaf, plan)
                if heads.get(transfer.receive) == transfer.receiver:
                    places[rank] += 1
                    places[transfer.receiver] += 1
                    moved = True
                    break
        assert moved, [str(action) for action in heads]


@pytest.mark.parametrize("name", names())
def test_gradients_are_reduced_once_for_each_stage_behind_its_last(name):
    plan = add_reduce_grad(build(name, 4, 8))
    assert add_reduce_grad(plan) == plan
    for rank, row in enumerate(plan.ranks):
        assert sorted(a.stage for a in row if a.kind == "REDUCE_GRAD") == list(plan.stages_of(rank))
        for place, action in enumerate(row):
            if action.kind == "REDUCE_GRAD":
                behind = [leaf for a in row[place:] for leaf in a.leaves() if leaf.kind in ("B", "W")]
                assert action.stage not in {leaf.stage for leaf in behind}
