"""Valid plans pass; every kind of damage is found, with its place, and all of it at once."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import random_plan, runs_to_its_end

from torchweave.errors import TorchweaveError
from torchweave.schedule.action import P2P, Action, pair
from torchweave.schedule.build import build, names
from torchweave.schedule.check import PlanError, check, faults_of
from torchweave.schedule.files import from_csv
from torchweave.schedule.memory import peak_activations
from torchweave.schedule.passes import add_reduce_grad, add_send_recv, merge_pairs, split_backward, take_pairs_apart
from torchweave.schedule.plan import Plan

seeds = st.integers(0, 10_000)


def with_row(plan, rank, row):
    return replace(plan, ranks=(*plan.ranks[:rank], tuple(row), *plan.ranks[rank + 1 :]))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("change", [lambda p: p, split_backward, merge_pairs, take_pairs_apart, add_reduce_grad])
def test_built_plans_pass_with_and_without_transfers(name, change):
    for num_ranks in (2, 4, 6):
        for rounds in (2, 3, 5):
            plan = change(build(name, num_ranks, num_ranks * rounds))
            assert faults_of(plan) == ()
            assert faults_of(add_send_recv(plan)) == ()


@given(seeds)
def test_random_valid_plans_pass(seed):
    plan = random_plan(seed)
    for valid in (plan, merge_pairs(plan), split_backward(plan)):
        assert faults_of(valid) == ()
        assert faults_of(add_send_recv(valid)) == ()


@given(seeds)
def test_a_missing_action_is_told_at_its_rank_and_nothing_else_is(seed):
    plan, draw = random_plan(seed), random.Random(seed)
    rank = draw.choice([rank for rank, row in enumerate(plan.ranks) if row])
    row = list(plan.ranks[rank])
    gone = row.pop(draw.randrange(len(row)))
    faults = faults_of(with_row(plan, rank, row))
    assert [fault.rank for fault in faults] == [rank]
    assert f"microbatch {gone.microbatch} through stage {gone.stage} is missing" in faults[0].text


@given(seeds)
def test_an_action_twice_is_told_at_its_second_place(seed):
    plan, draw = random_plan(seed), random.Random(seed)
    rank = draw.choice([rank for rank, row in enumerate(plan.ranks) if row])
    row = list(plan.ranks[rank])
    row.append(draw.choice(row))
    (fault,) = faults_of(with_row(plan, rank, row))
    assert (fault.rank, fault.place) == (rank, len(row) - 1)
    assert "there already" in fault.text


@given(seeds)
def test_an_action_on_a_wrong_rank_is_told(seed):
    plan, draw = random_plan(seed), random.Random(seed)
    if plan.num_ranks == 1:
        return
    rank = draw.choice([rank for rank, row in enumerate(plan.ranks) if row])
    row = list(plan.ranks[rank])
    moved = row.pop(draw.randrange(len(row)))
    other = (rank + 1) % plan.num_ranks
    wrong = with_row(with_row(plan, rank, row), other, [*plan.ranks[other], moved])
    assert any(f"stands on rank {rank}, not on rank {other}" in fault.text for fault in faults_of(wrong))


@given(seeds, st.booleans(), st.booleans())
def test_a_plan_with_two_actions_exchanged_is_wrong_exactly_if_it_does_not_run(seed, with_p2p, with_pairs):
    # the same rank, any two places: too early, a circle of ranks, a mismatch of sends, or still right
    plan, draw = random_plan(seed), random.Random(seed)
    plan = merge_pairs(plan) if with_pairs else plan
    plan = add_send_recv(plan) if with_p2p else plan
    rank = draw.choice([rank for rank, row in enumerate(plan.ranks) if row])
    row = list(plan.ranks[rank])
    one, other = draw.randrange(len(row)), draw.randrange(len(row))
    row[one], row[other] = row[other], row[one]
    changed = with_row(plan, rank, row)
    assert (faults_of(changed) == ()) == runs_to_its_end(changed)


@given(seeds)
def test_a_lost_or_repeated_transfer_is_told(seed):
    plan, draw = add_send_recv(random_plan(seed)), random.Random(seed)
    places = [(r, p) for r, row in enumerate(plan.ranks) for p, action in enumerate(row) if action.kind in P2P]
    if len(places) < 3:  # without its only transfer, a plan is one of computing actions alone
        return
    rank, place = draw.choice(places)
    row = plan.ranks[rank]
    lost = faults_of(with_row(plan, rank, row[:place] + row[place + 1 :]))
    assert [(fault.rank, fault.place) for fault in lost] == [(rank, None)]
    assert f"{row[place]} is missing" in lost[0].text
    repeated = faults_of(with_row(plan, rank, (*row, row[place])))
    assert [(fault.rank, fault.place) for fault in repeated] == [(rank, len(row))]


def test_two_ranks_that_both_send_first_are_told_as_a_circle():
    # the classic: each end of a link sends before it receives
    plan = from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
        "x",
    )
    assert [(fault.rank, fault.place) for fault in faults_of(plan)] == [(0, 3), (1, 3)]
    assert "waits for ever: for 1RECV_F1, which rank 1 comes to only behind 1SEND_B0" in faults_of(plan)[0].text


def test_a_circle_is_told_only_where_it_is():
    # rank 2 waits too, but it is not what is wrong
    plan = from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n2F0,2F1,2B0,2B1\n", "x")
    assert {fault.rank for fault in faults_of(plan)} == {0, 1}


def test_a_pair_of_one_microbatch_at_one_stage_cannot_be():
    plan = Plan("x", ((pair(Action(0, "F", 0), Action(0, "B", 0)),),), ((0,),), 1)
    (fault,) = faults_of(plan)
    assert "stands before what it needs: the forward of microbatch 0 through stage 0" in fault.text


def test_stages_and_microbatches_that_there_are_not():
    plan = from_csv("0F0,0B0,0F1,0B1,7F0,0F9,3REDUCE_GRAD\n1F0,1B0,1F1,1B1,1REDUCE_GRAD\n", "x")
    assert [fault.text for fault in faults_of(plan)] == [
        "7F0: there is no stage 7, the last is 1",
        "0F9: there is no microbatch 9, the last is 1",
        "3REDUCE_GRAD: there is no stage 3, the last is 1",
    ]


@pytest.mark.parametrize("name", names())
def test_the_limit_of_activations_is_the_most_that_may_be(name):
    plan = build(name, 4, 8)
    most = max(peak_activations(plan))
    assert faults_of(plan, most) == ()
    faults = faults_of(plan, most - 1)
    assert {fault.rank for fault in faults} == {r for r, peak in enumerate(peak_activations(plan)) if peak == most}
    assert all(f"the limit is {most - 1}" in fault.text for fault in faults)


def test_the_error_shows_every_fault_with_its_cell_marked():
    broken = from_csv("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1F1,1B1\n", "broken.csv")
    with pytest.raises(PlanError, match=r"broken\.csv, with 2 faults") as caught:
        check(broken)
    assert isinstance(caught.value, TorchweaveError)
    assert str(caught.value).splitlines()[1:] == [
        "rank 1, action 1: 1B0 stands before what it needs: the forward of microbatch 0 through stage 1",
        "    >1B0< 1F0 1F1 1F1 ...",
        "rank 1, action 4: 1F1: the forward of this microbatch is there already",
        "    1B0 1F0 1F1 >1F1< 1B1",
    ]


def test_so_many_faults_are_counted_and_not_all_printed():
    plan = from_csv("0F0,0B0\n1F0,1B0\n", "x")
    broken = replace(plan, num_microbatches=50)
    with pytest.raises(PlanError, match=r"and 78 more$"):
        check(broken)
