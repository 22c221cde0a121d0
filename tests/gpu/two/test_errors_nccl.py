"""Whatever fails over NCCL, on both ranks or on one: the right error on each, in time, and groups that are in step.

Where waits hold the host (TORCH_NCCL_BLOCKING_WAIT), everything is as over gloo. Where they do not, as NCCL has it by
default, a rank whose peer is gone is ended by NCCL's own watchdog.
"""

import os

import pytest
import torch
import torch.distributed as dist
from harness import attempt
from pool import Pool, RanksFailedError
from test_weave_errors import (
    Scene,
    deviate,
    die,
    fail_alike,
    fail_alone,
    fail_alone_in_the_record,
    fail_alone_then_remake,
    interrupt,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

# the group's timeout: longer than a communicator's first collectives take
LIMIT_S = 5.0
# how much later an error may come: one rank waits for NCCL, and then the other for its word
GRACE_S = 10.0
BOTH = ("turns", "streams")


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("strands", [("forward",), ("backward",), ("forward", "backward")], ids="+".join)
def test_failing_alike_leaves_the_group_working(pool, strategy, strands):
    """Catches an error that is wrapped or swallowed, and a communicator that is out of step after it."""
    for kind, text, trace, _ in pool.run(fail_alike, strategy, strands, group_timeout_s=LIMIT_S):
        assert (kind, text) == ("PlantedError", "planted here"), f"{kind}: {text}\n{trace}"


@pytest.mark.parametrize("strategy", BOTH)
def test_one_rank_that_fails_alone_is_named_on_the_other(blocking_pool, strategy):
    """Catches a hang, wrong data, or an error that does not say which rank and strand began."""
    told = blocking_pool.run(fail_alone, strategy, "forward", 1, group_timeout_s=LIMIT_S, breaks=True)
    (kind0, text0, trace0, seconds0), *again0 = told[0]
    (kind1, _, trace1, seconds1), *again1 = told[1]
    assert kind1 == "PlantedError", trace1
    assert kind0 == "BrokenGroupError", trace0
    assert "rank 1" in text0, text0
    assert "forward strand" in text0, text0
    assert "planted here" in text0, text0
    assert max(seconds0, seconds1) < LIMIT_S + GRACE_S, (seconds0, seconds1)
    for kind, _, trace, _ in (*again0, *again1):
        assert kind == "BrokenGroupError", f"the broken group was used again: {kind}\n{trace}"


def test_one_rank_that_fails_alone_in_the_first_pair(blocking_pool):
    """Catches an agreement that waits for a rank that will never speak."""
    told = blocking_pool.run(fail_alone_in_the_record, 1, group_timeout_s=LIMIT_S, breaks=True)
    assert told[1][0] == "PlantedError", told[1][2]
    assert told[0][0] == "BrokenGroupError", told[0][2]
    assert "rank 1" in told[0][1], told[0][1]
    assert max(told[0][3], told[1][3]) < LIMIT_S + GRACE_S


def test_a_group_made_again_after_a_failure_works(blocking_pool):
    """Catches a remedy that does not help: numbers of agreements or pairs that differ between ranks."""
    told = blocking_pool.run(fail_alone_then_remake, "turns", "woven", group_timeout_s=LIMIT_S, breaks=True)
    assert told == ["BrokenGroupError", "PlantedError"]


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("how", ["one more", "another operation", "a region", "object"])
def test_a_deviation_on_both_ranks_sends_nothing_and_names_its_place(pool, strategy, how):
    """Catches a crossing that no proof covers and is carried out all the same."""
    told = pool.run(deviate, strategy, "forward", how, (0, 1), group_timeout_s=LIMIT_S)
    for rank, ((kind, text, trace, _), error) in enumerate(told):
        assert kind == "DeviationError", f"{kind}\n{trace}"
        assert (error["rank"], error["strand"]) == (str(rank), "forward"), text


@pytest.mark.parametrize("how", ["another operation", "a region"])
def test_a_deviation_on_one_rank_is_told_on_both(blocking_pool, how):
    """Catches data that is exchanged with the wrong partner because one rank has one crossing more."""
    told = blocking_pool.run(deviate, "turns", "forward", how, (0,), group_timeout_s=LIMIT_S, breaks=True)
    assert told[0][0][0] == "DeviationError", told[0][0][2]
    assert told[1][0][0] == "BrokenGroupError", told[1][0]
    assert "rank 0" in told[1][0][1], told[1][0][1]
    assert max(one[0][3] for one in told) < LIMIT_S + GRACE_S


def test_ctrl_c_on_both_ranks_leaves_the_group_working(pool):
    """Catches a Ctrl-C that is lost, or that hangs."""
    for (kind, text, trace, _), _ in pool.run(interrupt, "turns", "forward", (0, 1), group_timeout_s=LIMIT_S):
        assert kind == "KeyboardInterrupt", f"{kind}: {text}\n{trace}"


def test_ctrl_c_on_one_rank_is_told_on_the_other(blocking_pool):
    """Catches a rank that waits for ever for one that was interrupted."""
    told = blocking_pool.run(interrupt, "turns", "forward", (1,), group_timeout_s=LIMIT_S, breaks=True)
    assert told[1][0][0] == "KeyboardInterrupt", told[1][0][2]
    assert told[0][0][0] == "BrokenGroupError", told[0][0][2]
    assert max(one[0][3] for one in told) < LIMIT_S + GRACE_S


def test_a_rank_that_is_killed(tmp_path, blocking_pool):
    """Catches a wait that has no limit when the other end is not there any more."""
    path = tmp_path / "told"
    with pytest.raises(RanksFailedError, match="exit code 9"):
        blocking_pool.run(die, str(path), 1, "turns", False, group_timeout_s=LIMIT_S, timeout=60)
    kind, seconds, text = path.read_text().split("\n", 2)
    assert kind == "BrokenGroupError", text
    assert float(seconds) < LIMIT_S + GRACE_S


def die_unnoticed():
    """The host of the rank that is left is not held at a wait: it meets the missing data when it reads some."""
    scene = Scene("turns")
    scene.start()
    made = scene.pair(2)
    if dist.get_rank() == 1:
        scene.arm(("forward",), lambda: os._exit(9))

    def weave_and_read():
        _, loss = scene.weave_pair(made)
        return loss.item()

    return attempt(weave_and_read)[:2]


def test_without_waits_that_hold_the_host_nobody_hangs(pool):
    """Catches a rank that waits for ever, on its host or its device, for one that was killed."""
    with pytest.raises(RanksFailedError, match="exit code 9") as caught:
        pool.run(die_unnoticed, group_timeout_s=LIMIT_S, timeout=90)
    # NCCL's watchdog ends the process, if the engine has not raised before
    assert "hangs at" not in str(caught.value), caught.value


def test_a_pool_of_nccl_ranks_is_of_use_after_all_that():
    """Catches a device that is left in a state in which nothing more can run."""
    pool = Pool(2, "nccl")
    try:
        assert [told[0] for told in pool.run(fail_alike, "turns", ("forward",))] == ["PlantedError"] * 2
    finally:
        pool.close()
