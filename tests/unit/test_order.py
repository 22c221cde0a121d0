"""The woven order and its proof: a permutation of the serial operations that fits on all ranks, or why not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torchweave.engine.order import REGION, WAIT, Action, disagreement, members_of, woven

GROUPS = {"world": (0, 1), "other": (0, 1), "lone": (0,)}


def complete(issues, late, regions=()):
    """A strand that issues on the channels in turn and waits for each, at once or at its end."""
    steps, kept = [], []
    for number, (channel, is_late) in enumerate(zip(issues, late, strict=True)):
        steps.append(("op", channel))
        if is_late:
            kept.append(number)
        else:
            steps.append((WAIT, number))
        if number in regions:
            steps.append((REGION, 0))
    return tuple(steps + [(WAIT, number) for number in kept])


@st.composite
def records(draw, channels=("world", "other")):
    issues = draw(st.lists(st.sampled_from(channels), max_size=7))
    late = draw(st.lists(st.booleans(), min_size=len(issues), max_size=len(issues)))
    regions = draw(st.sets(st.integers(0, 6)))
    return complete(issues, late, regions)


def serial_actions(backward, forward):
    """What a rank issues serially: channel and number on that channel, backward first."""
    counts, found = {}, []
    for operation, channel in (*backward, *forward):
        if operation not in (WAIT, REGION):
            counts[channel] = counts.get(channel, -1) + 1
            found.append((channel, counts[channel]))
    return found


@given(records(), records())
def test_woven_is_a_permutation_of_the_serial_operations(backward, forward):
    """Catches an operation that is lost, doubled or renumbered by the weaving."""
    actions = woven(backward, forward)
    issued = [(action.channel, action.serial) for action in actions if action.channel]
    assert sorted(issued) == sorted(serial_actions(backward, forward))
    num_waits = sum(step[0] in (WAIT, REGION) for step in (*backward, *forward))
    assert sum(not action.channel for action in actions) == num_waits


@given(records(), records())
def test_each_strand_keeps_its_own_order(backward, forward):
    """Catches an order in which a strand waits for what it has not issued yet."""
    actions = woven(backward, forward)
    of_backward = set(serial_actions(backward, ()))
    own = [(a.channel, a.serial) for a in actions if a.channel and (a.channel, a.serial) in of_backward]
    assert own == serial_actions(backward, ())
    issued = set()
    for action in actions:
        if action.channel:
            issued.add((action.channel, action.serial))
        elif action.waits_on:
            assert (action.waits_on, action.serial) in issued


@given(records(), records())
def test_equal_records_on_all_ranks_never_disagree(backward, forward):
    """Catches a proof that refuses what is right."""
    plan = woven(backward, forward)
    assert disagreement({0: plan, 1: plan}, GROUPS) == ""


@given(records(), records(), records(), records())
def test_what_is_called_right_pairs_the_same_operations(backward0, forward0, backward1, forward1):
    """Catches a proof that passes ranks whose n-th operations on a channel differ: that is the silent corruption."""
    plans = {0: woven(backward0, forward0), 1: woven(backward1, forward1)}
    if disagreement(plans, GROUPS) == "":
        for channel in ("world", "other"):
            numbers = [[a.serial for a in plan if a.channel == channel] for plan in plans.values()]
            assert numbers[0] == numbers[1]
        assert run_together(plans)


def run_together(plans):
    """An independent run of all ranks against each other: does everybody come to an end?"""
    at = dict.fromkeys(plans, 0)
    done = {rank: set() for rank in plans}
    for _ in range(sum(map(len, plans.values())) + 1):
        for rank, plan in plans.items():
            if at[rank] == len(plan):
                continue
            action = plan[at[rank]]
            if action.channel:
                done[rank].add((action.channel, action.serial))
            elif action.waits_on:
                members = members_of(action.waits_on, GROUPS)
                if not all((action.waits_on, action.serial) in done[member] for member in members):
                    continue
            at[rank] += 1
    return all(at[rank] == len(plan) for rank, plan in plans.items())


@given(records(), st.integers(0, 12), st.sampled_from(("world", "other")))
@settings(max_examples=200)
def test_one_more_operation_on_one_rank_is_never_right(record, place, channel):
    """Catches a comparison that stops at the shorter sequence."""
    # one more operation, waited for at the strand's end
    number = sum(step[0] not in (WAIT, REGION) for step in record)
    longer = (*record, ("op", channel), (WAIT, number))
    for plans in (
        {0: woven(record, record), 1: woven(longer, record)},
        {0: woven(record, longer), 1: woven(record, record)},
    ):
        assert disagreement(plans, GROUPS) != ""


def test_the_facts_case_a_turn_more_on_a_group_of_its_own():
    """facts.md: rank 0's forward has one more collective, on a group of its own, at which it takes a turn."""
    strand = complete(["world"] * 4, [False] * 4)
    extra = complete(["lone", "world", "world", "world", "world"], [False] * 5)
    plans = {0: woven(strand, extra), 1: woven(strand, strand)}
    assert "on world" in disagreement(plans, GROUPS)


def test_a_region_on_one_rank_is_a_turn_more_too():
    """Catches regions that are left out of the proof, because they have no channel."""
    strand = complete(["world"] * 4, [False] * 4)
    extra = ((REGION, 0), *strand)
    assert disagreement({0: woven(strand, extra), 1: woven(strand, strand)}, GROUPS) != ""


def test_another_place_of_a_wait_is_found():
    """Catches a proof over operations alone: rank 1 waits late, so it gives its turn away at another place."""
    early = complete(["world"] * 3, [False] * 3)
    late = complete(["world"] * 3, [True, False, False])
    assert disagreement({0: woven(early, early), 1: woven(early, late)}, GROUPS) != ""


def test_two_ranks_that_receive_before_they_send_wait_for_ever():
    """Catches a deadlock that no channel's own order shows: each channel has one operation on both of its ends."""
    zero = (("recv", "world:1>0"), (WAIT, 0), ("send", "world:0>1"), (WAIT, 1))
    one = (("recv", "world:0>1"), (WAIT, 0), ("send", "world:1>0"), (WAIT, 1))
    told = disagreement({0: woven(zero, ()), 1: woven(one, ())}, GROUPS)
    assert "for ever" in told
    assert "rank 0" in told


def test_crossed_groups_wait_for_ever():
    """Catches two groups whose operations the ranks issue the other way round, and wait for each at once."""
    zero = complete(["world", "other"], [False, False])
    one = complete(["other", "world"], [False, False])
    assert "for ever" in disagreement({0: woven(zero, ()), 1: woven(one, ())}, GROUPS)
    # where both are started before either is waited for, all is well
    zero, one = complete(["world", "other"], [True, True]), complete(["other", "world"], [True, True])
    assert disagreement({0: woven(zero, ()), 1: woven(one, ())}, GROUPS) == ""


def test_three_ranks_in_a_ring_wait_for_ever():
    """Catches a deadlock over several groups of which each pair of ranks agrees."""
    groups = {"a": (0, 1), "b": (1, 2), "c": (2, 0)}
    plans = {
        0: woven(complete(["a", "c"], [False, False]), ()),
        1: woven(complete(["b", "a"], [False, False]), ()),
        2: woven(complete(["c", "b"], [False, False]), ()),
    }
    assert "for ever" in disagreement(plans, groups)


def test_a_rank_that_issues_nothing_on_a_group_of_its_own_is_found():
    """Catches a member that is left out of the comparison because its plan does not name the channel at all."""
    record = complete(["world"], [False])
    assert disagreement({0: woven(record, ()), 1: ()}, GROUPS) != ""
    assert disagreement({0: (), 1: woven(record, ())}, GROUPS) != ""


def test_one_sided_strands_fit():
    """Catches a proof that demands the same of sender and receiver: their records differ and are right."""
    send = (("send", "world:0>1"), (WAIT, 0)) * 1
    receive = (("recv", "world:0>1"), (WAIT, 0))
    both = complete(["world"] * 2, [False] * 2)
    plans = {0: woven((*send, *shifted(both, 1)), both), 1: woven((*receive, *shifted(both, 1)), both)}
    assert disagreement(plans, GROUPS) == ""


def shifted(record, by):
    return tuple((op, what + by) if op == WAIT else (op, what) for op, what in record)


def test_a_channel_of_two_ends_is_told_from_a_group():
    """Catches groups whose names hold colons, which NCCL's and DTensor's do."""
    assert members_of("pp:group:0>3", {}) == (0, 3)
    assert members_of("mesh:tp", {"mesh:tp": (1, 2)}) == (1, 2)


def test_the_backward_begins():
    """Catches forward first, which leaves the backward's first communication exposed (design.md)."""
    strand = complete(["world"], [False])
    first = woven(strand, strand)[:2]
    assert first == (Action("world", 0, ""), Action("world", 1, ""))
