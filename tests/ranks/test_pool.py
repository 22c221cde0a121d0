"""The pool itself: what it promises is what all other tests of ranks stand on."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import RanksFailedError


def add_ranks():
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return total.item()


def raise_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("planted")
    return "fine"


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)


def leave_state(what):
    if what == "dtype":
        torch.set_default_dtype(torch.float64)
    if what == "thread":
        threading.Thread(target=time.sleep, args=(5,), name="torchweave-left", daemon=True).start()


def test_results_come_back_by_rank(pool):
    """Catches a pool whose ranks do not share a group."""
    assert pool.run(add_ranks) == [3, 3]


def test_an_error_is_told_with_its_rank_and_traceback_and_the_next_job_works(pool):
    """Catches a pool that loses a rank's traceback, or is of no use after it."""
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1.*raise_on.*KeyError: 'planted'"):
        pool.run(raise_on, 1)
    assert pool.run(add_ranks) == [3, 3]


@pytest.mark.parametrize(("job", "told"), [(hang_on, "time.sleep|hang_on"), (die_on, "exit code 3")])
def test_a_hung_or_dead_rank_is_reported_and_replaced(pool, job, told):
    """Catches a pool that hangs the session, or goes on with a dead rank."""
    with pytest.raises(RanksFailedError, match=told):
        pool.run(job, 0, timeout=3)
    assert pool.run(add_ranks) == [3, 3]


@pytest.mark.parametrize(("what", "told"), [("dtype", "default dtype"), ("thread", "torchweave-left")])
def test_state_or_a_thread_left_behind_fails_the_job(pool, what, told):
    """Catches a pool that lets one test change what the next computes."""
    with pytest.raises(RanksFailedError, match=told):
        pool.run(leave_state, what)
    assert pool.run(add_ranks) == [3, 3]
