"""Simulated steps are what the papers' formulas and a plain computation say."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import random_plan

from torchweave.errors import UsageError
from torchweave.schedule.action import COMPUTE
from torchweave.schedule.build import build, names
from torchweave.schedule.costs import Costs
from torchweave.schedule.memory import peak_activations
from torchweave.schedule.passes import add_send_recv, merge_pairs
from torchweave.schedule.plan import inputs_of, result_of
from torchweave.schedule.simulate import simulate, timeline

times = st.floats(0.25, 4)


def bubbles(plan, costs):
    found = simulate(plan, costs)
    return [found.step_time - busy for busy in found.busy]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("forward", [1.0, 1.5])
def test_bubbles_are_those_of_deepseeks_table(num_ranks, forward):
    # the table counts them for I not shorter than F, and W not longer than either
    backward, weight = 2 * forward, forward
    costs = Costs(F=forward, B=backward, W=weight)
    both = forward + backward
    assert bubbles(build("1f1b", num_ranks, 3 * num_ranks), costs) == pytest.approx(
        [(num_ranks - 1) * both] * num_ranks
    )
    assert bubbles(build("zb-h1", num_ranks, 3 * num_ranks), costs) == pytest.approx(
        [(num_ranks - 1) * (both - 2 * weight)] * num_ranks
    )
    assert bubbles(build("dualpipe", num_ranks, 3 * num_ranks), costs) == pytest.approx(
        [(num_ranks / 2 - 1) * (both + backward - 3 * weight)] * num_ranks
    )


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_activations_are_those_of_deepseeks_table(num_ranks):
    assert max(peak_activations(build("1f1b", num_ranks, 3 * num_ranks))) == num_ranks
    assert max(peak_activations(build("zb-h1", num_ranks, 3 * num_ranks))) == num_ranks
    assert set(peak_activations(build("dualpipe", num_ranks, 3 * num_ranks))) == {num_ranks + 1}
    assert set(peak_activations(build("gpipe", num_ranks, 3 * num_ranks))) == {3 * num_ranks}


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_zbv_waits_only_before_its_first_action(num_ranks):
    found = simulate(build("zbv", num_ranks, 4 * num_ranks), Costs(F=1, B=2, W=1))
    for row in found.ranks:
        assert all(before.end == after.begin for before, after in pairwise(row))


@given(st.integers(0, 10_000), st.lists(times, min_size=6, max_size=6), times, st.booleans())
def test_every_action_begins_as_soon_as_it_can_and_no_sooner(seed, forwards, p2p, with_pairs):
    plan = random_plan(seed)
    plan = merge_pairs(plan) if with_pairs else plan
    stages = plan.num_stages
    costs = Costs(F=tuple(forwards[:stages]), B=3.0, W=1.0, comm=0.5, p2p=p2p, recovered=0.75)
    found, ends = simulate(plan, costs), {}
    received = {}
    for rank, row in enumerate(add_send_recv(plan).ranks):
        begun = 0.0
        spans = iter(found.ranks[rank])
        for action in row:
            if action.kind in COMPUTE:
                begun = next(spans).end
            received[rank, action] = begun
    for rank, row in enumerate(found.ranks):
        for span in row:
            ends |= {result_of(leaf): (span.end, rank) for leaf in span.action.leaves()}

    def there(rank, leaf, need):
        end, home = ends[need]
        if home == rank:
            return end
        receive = leaf._replace(kind="RECV_F" if need[0] == "F" else "RECV_B")
        return max(end, received[rank, receive]) + p2p

    for rank, row in enumerate(found.ranks):
        free = 0.0
        for span in row:
            needed = [(leaf, need) for leaf in span.action.leaves() for need in inputs_of(leaf, stages)]
            assert span.begin == max([free, *(there(rank, *one) for one in needed)])
            free = span.end
    assert found.step_time == max(row[-1].end for row in found.ranks if row)


@pytest.mark.parametrize(
    ("costs", "length"),
    [
        (Costs(F=1, B=2, comm=0.5), 3.0),  # computation is longer
        (Costs(F=1, B=2, comm=4), 8.0),  # communication is longer
        (Costs(F=1, B=2, comm=0.5, recovered=0.0), 4.0),
        (Costs(F=1, B=2, comm=0.5, recovered=0.8), 3.2),
        (Costs(F=1, B=2, comm=0.5, comm_backward=1.0, recovered=0.0), 4.5),
    ],
)
def test_a_pair_takes_what_the_recovered_share_says(costs, length):
    plan = build("dualpipev", 2, 6)
    pairs = [span for row in simulate(plan, costs).ranks for span in row if span.action.parts]
    assert pairs
    assert [span.end - span.begin for span in pairs] == pytest.approx([length] * len(pairs))


def test_serial_pairs_are_a_forward_and_a_backward():
    plan = build("dualpipev", 2, 6)
    serial = simulate(plan, Costs(comm=0.5), woven=False)
    assert not any(span.action.parts for row in serial.ranks for span in row)
    assert serial.busy == pytest.approx([6 * 2 * 4.0] * 2)  # each rank: 6 microbatches through 2 stages


@pytest.mark.parametrize("name", names())
def test_weaving_never_adds_work_and_a_longer_action_never_shortens_a_step(name):
    plan = build(name, 4, 8)
    base = simulate(plan, Costs(comm=0.5, recovered=0.5))
    assert simulate(plan, Costs(comm=0.5, recovered=0.8)).step_time <= base.step_time
    for longer in ({"F": 1.2}, {"B": 2.2}, {"comm": 0.6}, {"p2p": 0.1}):
        assert simulate(plan, Costs(**({"comm": 0.5, "recovered": 0.5} | longer))).step_time >= base.step_time - 1e-9


def test_costs_of_their_own_for_each_stage_and_measured_durations():
    plan = build("1f1b", 2, 1)
    assert simulate(plan, Costs(F=(1.0, 3.0), B=(2.0, 5.0), W=1.0)).step_time == 1 + 3 + 5 + 2
    measured = {"0F0": 1.0, "1F0": 3.0, "1B0": 5.0, "0B0": 2.5}
    assert timeline(plan, lambda action: measured[str(action)], p2p=0.5)[0][-1].end == 1 + 0.5 + 3 + 5 + 0.5 + 2.5


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("", Costs()),
        ("F=1,B=2,W=1,comm=0.5", Costs(F=1.0, B=2.0, W=1.0, comm=0.5)),
        (" F = 3 , recovered=.8", Costs(F=3.0, recovered=0.8)),
        ("F=1/2,p2p=1e-3", Costs(F=(1.0, 2.0), p2p=0.001)),
    ],
)
def test_costs_are_read(text, costs):
    assert Costs.parse(text) == costs
    assert Costs.parse(str(costs).replace(" ", ",")).table(2) == costs.table(2)


def test_what_is_not_given_follows_from_what_is():
    table = Costs(F=(1.0, 2.0)).table(2)
    assert table.compute == {"F": [1.0, 2.0], "B": [2.0, 4.0], "W": [1.0, 2.0], "I": [1.0, 2.0]}
    assert Costs(B=2.0, W=0.5).table(1).compute["I"] == [1.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F", "NAME=NUMBER"),
        ("G=1", "a name is one of"),
        ("F=1,F=2", "each once"),
        ("F=x", "NAME=NUMBER"),
        ("F=", "NAME=NUMBER"),
        ("F=-1", "0, or between"),
        ("F=nan", "0, or between"),
        ("F=inf", "0, or between"),
        ("F=1e308", "0, or between"),  # sums of these are infinite
        ("F=1e-320", "0, or between"),  # and so are their ratios
        ("recovered=1.5", "at most 1"),
        ("p2p=1/2", "one number, for all stages"),
        ("W=3", "a part of it"),
        ("F=1/2", "one for each of the 4 stages"),
    ],
)
def test_costs_that_cannot_be_are_refused(text, said):
    with pytest.raises(UsageError, match=said) as caught:
        simulate(build("zb-h1", 4, 4), Costs.parse(text))
    assert caught.value.remedy


def test_a_plan_that_blocks_is_not_simulated():
    plan = build("1f1b", 2, 2)
    broken = type(plan)("x", (plan.ranks[0][::-1], plan.ranks[1]), plan.placement, 2)
    with pytest.raises(ValueError, match="check says where"):
        simulate(broken)
