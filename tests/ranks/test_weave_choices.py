"""`auto` on two ranks: it measures, both ranks choose alike, and the environment overrides it."""

from __future__ import annotations

import os
import threading
import time

import torch.distributed as dist
from harness import Cross, chunk, pair_of

import torchweave as tw
from torchweave.engine.trial import READ, ROUNDS, SETTLE
from torchweave.errors import UsageError
from torchweave.measure.link import SimulatedLink

# the recorded pair, a measured one, three strategies; another order is not found in every run, and then a few more
UNTIL_CHOSEN = 1 + 1 + 3 * ROUNDS + ROUNDS + SETTLE + READ + 1


def works(x):
    """Takes a while in both directions, without a processor."""
    time.sleep(0.01)
    return x * 1


def reduced(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def run(pair, num_pairs):
    for step in range(num_pairs):
        one = pair(step)
        tw.weave(one.forward, one.backward)
    (choice,) = tw.choices()
    return choice


def long_communication():
    # 24 bytes in 10 ms
    with SimulatedLink(24 * 8 / 0.01 / 1e9):
        return run(
            pair_of(*(chunk(Cross(works), Cross(reduced), Cross(works), Cross(reduced)) for _ in range(2))),
            UNTIL_CHOSEN,
        )


def test_both_ranks_take_what_is_faster(pool):
    """Catches a choice that is not measured: here communication is as long as computation."""
    one, other = pool.run(long_communication)
    assert one.strategy == other.strategy != "serial"
    assert one.times_ms == other.times_ms
    assert one.times_ms[one.strategy] < 0.8 * one.times_ms["serial"]
    assert one.num_pairs == UNTIL_CHOSEN - 1
    assert one.num_crossings == (2, 2)
    assert "the fastest of" in one.reason
    assert "test_weave_choices.py" in str(one) or "harness.py" in str(one)


def slow_where_woven(x):
    if dist.get_rank() == 1 and threading.current_thread() is not threading.main_thread():
        time.sleep(0.2)
    return x * 1


def woven_is_slow_on_rank_one():
    return run(
        pair_of(*(chunk(Cross(reduced), Cross(slow_where_woven), Cross(reduced)) for _ in range(2))), UNTIL_CHOSEN
    )


def test_both_ranks_stay_serial_where_weaving_is_slow_on_one(pool):
    """Catches ranks that choose by their own times."""
    one, other = pool.run(woven_is_slow_on_rank_one)
    assert one.strategy == other.strategy == "serial", f"{one}\n{other}"
    assert one.times_ms == other.times_ms


def run_with(settings):
    os.environ.pop("TORCHWEAVE_STRATEGY", None)
    setting = settings[dist.get_rank()]
    if setting:
        os.environ["TORCHWEAVE_STRATEGY"] = setting
    try:
        pair = pair_of(*(chunk(Cross(reduced)) for _ in range(2)))
        for step in range(3):
            one = pair(step)
            tw.weave(one.forward, one.backward, strategy="turns")
        return [choice.strategy for choice in tw.choices()]
    except (UsageError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop("TORCHWEAVE_STRATEGY", None)


def test_the_environment_overrides_every_weave(pool):
    """Catches a switch for emergencies that the code's own choice outdoes."""
    assert pool.run(run_with, ["serial", "serial"]) == [[], []]


def test_a_strategy_in_the_environment_has_to_exist(pool):
    """Catches a typing error that silently switches nothing."""
    for told in pool.run(run_with, ["sreial", "sreial"]):
        assert told.startswith(
            "UsageError: TORCHWEAVE_STRATEGY is one of auto, serial, turns, streams. Given: 'sreial'"
        )


def test_a_setting_on_some_ranks_only_is_told_at_once(pool):
    """Catches a rank that waits for its whole timeout for one that will never record."""
    begun = time.monotonic()
    _, told = pool.run(run_with, ["serial", ""], group_timeout_s=20.0)
    assert told.startswith("UsageError")
    assert "rank 0 has TORCHWEAVE_STRATEGY=serial, rank 1 has not" in told
    assert time.monotonic() - begun < 15
