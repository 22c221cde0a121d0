"""Schedules are compared for one model, and the advice follows from the table."""

import pytest

from torchweave.errors import UsageError
from torchweave.schedule.build import names
from torchweave.schedule.compare import Candidate, advice, compare
from torchweave.schedule.costs import Costs


def by_name(found):
    return {candidate.name: candidate for candidate in found.candidates}


def test_all_schedules_do_the_same_work():
    # catches a schedule that is charged for chunks of another size: without waiting, all would take as long
    found = by_name(compare(4, 16, Costs(comm=0.5)))
    assert set(found) == set(names())
    for candidate in found.values():
        work = candidate.woven * (1 - candidate.bubble_share)
        if not candidate.has_pairs:
            assert work == pytest.approx(16 * 4.0)
        else:
            assert 16 * 3.0 <= work < 16 * 4.0


def test_activations_and_copies_are_comparable():
    found = by_name(compare(8, 32))
    assert (found["1f1b"].activations, found["zbv"].activations, found["dualpipev"].activations) == (8, 8, 8.5)
    assert (found["dualpipe"].activations, found["dualpipe"].parameter_copies) == (9, 2)
    assert {c.parameter_copies for c in found.values() if c.name != "dualpipe"} == {1}


def test_the_shortest_comes_first_and_what_cannot_be_says_why():
    found = compare(3, 7, Costs(comm=0.5))
    assert [c.best for c in found.candidates] == sorted(c.best for c in found.candidates)
    assert {name for name, _ in found.refused} == {"interleaved", "interleaved-pairs", "dualpipe"}
    assert "even number of ranks" in dict(found.refused)["dualpipe"]


def test_a_limit_of_memory_leaves_out_what_holds_more():
    found = compare(8, 32, Costs(comm=0.5), max_activations=8.5)
    assert {c.name for c in found.candidates} == {"1f1b", "zb-h1", "zbv", "dualpipev"}
    assert dict(found.refused)["gpipe"] == "holds 32 activations, more than 8.5"
    with pytest.raises(UsageError, match="At least one schedule"):
        compare(8, 32, max_activations=1)


@pytest.mark.parametrize("numbers", [(0, 8), (4, 0), (4, 8, None, 0)])
def test_impossible_numbers_are_an_error_and_no_refusal_of_each(numbers):
    with pytest.raises(UsageError, match="at least 1 of its"):
        compare(*numbers)


def test_costs_of_each_stage_do_not_fit_all_schedules():
    with pytest.raises(UsageError, match="different numbers of stages"):
        compare(4, 8, Costs(F=(1.0, 2.0, 1.0, 1.0)))


def candidate(name, serial, woven, activations=4.0, copies=1, has_pairs=True):
    return Candidate(name, serial, woven, 0.1, activations, copies, has_pairs)


def test_advice_takes_less_memory_if_the_step_is_as_good():
    said = advice(
        [candidate("dualpipe", 130, 100, 5, 2), candidate("dualpipev", 130, 100.5), candidate("1f1b", 150, 150)]
    )
    assert said.startswith("Take dualpipev: its step of 100.5 is within 1% of dualpipe's in less memory, 33% shorter")
    assert "weaving takes off 23% of it" in said


def test_advice_says_when_weaving_gains_nothing():
    said = advice([candidate("dualpipe", 99, 102, 5, 2), candidate("1f1b", 120, 120, has_pairs=False)])
    assert "weaving gains nothing" in said
    assert "2 copies of the parameters; with one copy, take 1f1b, 21% longer." in said


def test_weaving_changes_the_advice():
    # what the comparison is for: with communication to hide, a schedule with pairs wins
    assert compare(8, 32, Costs()).advice.startswith("Take zbv:")
    assert compare(8, 32, Costs(comm=0.5)).advice.startswith("Take dualpipev:")
