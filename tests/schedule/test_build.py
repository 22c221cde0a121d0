"""Every builder gives the plan of torch, of DeepSeek's runtime, or of a golden file, and refuses impossible numbers."""

from collections import Counter
from pathlib import Path

import pytest

from torchweave.errors import UsageError
from torchweave.schedule.action import PAIR
from torchweave.schedule.build import build, names

GOLDEN = Path(__file__).parent / "golden"
CHUNKS = {"interleaved": (1, 2, 3, 4), "zbv": (2,), "dualpipev": (2,)}


def texts(plan):
    return tuple(tuple(map(str, row)) for row in plan.ranks)


@pytest.mark.parametrize("name", [name for name in names() if name not in ("dualpipe", "interleaved-pairs")])
def test_the_plan_is_torchs_own(name):
    torch_plans = pytest.importorskip("torch_plans")
    compared = 0
    for num_chunks in CHUNKS.get(name, (1,)):
        for num_ranks in (1, 2, 3, 4, 5, 8):
            for num_microbatches in range(1, 25):
                try:
                    theirs = torch_plans.torch_plan(name, num_ranks, num_microbatches, num_chunks)
                except ValueError:
                    continue  # torch has none for these numbers
                assert texts(build(name, num_ranks, num_microbatches, num_chunks)) == theirs
                compared += 1
    assert compared > 80


def golden_plans():
    return [pytest.param(path, id=path.stem) for path in sorted(GOLDEN.glob("*.txt"))]


@pytest.mark.parametrize("path", golden_plans())
def test_the_plan_is_the_golden_one(path):
    name, ranks, microbatches = path.stem.rsplit("_", 2)
    lines = [" ".join(row) for row in texts(build(name, int(ranks), int(microbatches)))]
    assert lines == path.read_text(encoding="utf-8").splitlines()


def test_every_schedule_has_a_golden_plan():
    assert {path.stem.rsplit("_", 2)[0] for path in GOLDEN.glob("*.txt")} == set(names())


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("more", [0, 2, 10])
def test_dualpipe_is_symmetric_and_its_steady_state_is_pairs(num_ranks, more):
    # catches microbatches that enter at the wrong end: rank r's mirror does the same with the other half
    num_microbatches = 2 * num_ranks + more
    plan, half = build("dualpipe", num_ranks, num_microbatches), num_microbatches // 2
    for rank, row in enumerate(plan.ranks):
        mirrored = [
            leaf._replace(microbatch=(leaf.microbatch + half) % num_microbatches) for a in row for leaf in a.leaves()
        ]
        assert mirrored == [leaf for a in plan.ranks[num_ranks - 1 - rank] for leaf in a.leaves()]
        pairs = sum(action.kind == PAIR for action in row)
        place = min(rank, num_ranks - 1 - rank)
        middle = place == num_ranks // 2 - 1
        # steps 4 and 5 of the paper: two pairs a turn, one in each turn of the drain, and one left out in the middle
        assert pairs == 2 * (half - num_ranks + place + 1) + (num_ranks // 2 - 1 - place) - middle


@pytest.mark.parametrize("name", names())
def test_every_microbatch_meets_every_stage_on_the_rank_that_has_it(name):
    plan = build(name, 4, 12)
    seen = Counter()
    for rank, row in enumerate(plan.ranks):
        for leaf in (leaf for action in row for leaf in action.leaves()):
            assert plan.rank_of(leaf.stage, leaf.microbatch) == rank
            assert leaf.stage in plan.stages_of(rank)
            seen["F" if leaf.kind == "F" else "W" if leaf.kind == "W" else "I", leaf.stage, leaf.microbatch] += 1
            seen["W", leaf.stage, leaf.microbatch] += leaf.kind == "B"
    assert set(seen.values()) == {1}
    assert len(seen) == 3 * plan.num_stages * 12


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("dualpipe", 3, 12), "even number of ranks"),
        (("dualpipe", 4, 9), "even number of microbatches"),
        (("dualpipe", 4, 6), "at least 2 for each rank"),
        (("dualpipev", 4, 7), "at least 2 microbatches for each rank"),
        (("interleaved", 4, 9), "equal rounds"),
        (("interleaved", 4, 8, 0), "at least 1 of its chunks"),
        (("1f1b", 0, 8), "at least 1 of its ranks"),
        (("1f1b", 4, -1), "at least 1 of its microbatches"),
        (("zbv", 4, 8, 3), "has 2 stages on each rank"),
        (("1f1b", 4, 8, 2), "has 1 stage on each rank"),
        (("dualpip", 4, 8), "one of gpipe"),
        (("1f1b", 1_000_000, 1_000_000), "does not fit into memory"),
    ],
)
def test_impossible_numbers_are_refused_with_a_remedy(words, rule):
    with pytest.raises(UsageError, match=rule) as caught:
        build(*words)
    assert caught.value.remedy


def test_a_misspelt_name_is_told_what_was_meant():
    with pytest.raises(UsageError, match="take dualpipe"):
        build("DualPip", 4, 8)


def test_the_remedy_for_uneven_rounds_and_for_dualpipe_is_one():
    # a remedy that is refused itself helps nobody
    build("interleaved", 4, 8)
    build("interleaved", 4, 12)
    build("dualpipe", 4, 8)
    build("dualpipe", 4, 10)
