"""The backward's thread: a job runs once or never, and Ctrl-C at its start leaves nothing behind."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch
import torch.distributed as dist

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.engine.worker import NAME, Worker

LIMIT_S = 20


class Queue:
    """A queue whose `put` is interrupted, before or after it has put."""

    def __init__(self, jobs, when):
        self.jobs, self.when = jobs, when

    def put(self, job):
        if job is not None and self.when == "before":
            raise KeyboardInterrupt
        self.jobs.put(job)
        if job is not None:
            raise KeyboardInterrupt

    def get(self):
        return self.jobs.get()


def test_a_job_runs_on_the_thread_and_is_waited_for():
    """Catches an end that is told before the job has ended."""
    worker, go_on, ran = Worker(), threading.Event(), []
    worker.start(lambda: (go_on.wait(LIMIT_S), ran.append(threading.current_thread().name)))
    assert not worker.is_idle
    assert not worker.wait(0.01)
    go_on.set()
    assert worker.wait(LIMIT_S)
    assert worker.is_idle
    assert ran == [NAME]
    worker.retire()
    assert worker.wait(LIMIT_S)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_start_leaves_a_job_that_runs_or_never_will(when):
    """Catches a wait for a job that nobody has, and an idle worker whose job still runs."""
    worker, ran = Worker(), []
    worker._jobs = Queue(worker._jobs, when)
    with pytest.raises(KeyboardInterrupt):
        worker.start(lambda: ran.append(1))
    assert worker.wait(LIMIT_S)
    worker.retire()
    assert len(ran) <= (when == "after")
    worker.start(lambda: ran.append(2))
    assert worker.wait(LIMIT_S)
    assert ran[-1] == 2
    worker.retire()


@pytest.fixture
def lone_rank():
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    engine().channels.lone_groups_are_slow = True
    yield
    engine().channels.lone_groups_are_slow = False
    engine().close()
    dist.destroy_process_group()


def reduced():
    total = torch.zeros(2)
    for _ in range(3):
        x = torch.ones(2)
        dist.all_reduce(x)
        total += x
    return total


@pytest.mark.parametrize("strategy", ["turns", "streams"])
@pytest.mark.parametrize("when", ["before", "after", "no thread"])
def test_a_pair_that_is_interrupted_at_its_start_leaves_the_next_one_alone(lone_rank, strategy, when, monkeypatch):
    """Catches a strand that waits its whole limit for one that never began, and a thread that stays a strand's."""
    for _ in range(2):
        tw.weave(reduced, reduced, strategy=strategy)
    start, error = Worker.start, KeyboardInterrupt if when != "no thread" else RuntimeError

    def interrupted(worker, run):
        if when == "no thread":
            worker._thread = None
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more")))
                start(worker, run)
        worker._jobs = Queue(worker._jobs, when)
        start(worker, run)

    monkeypatch.setattr(Worker, "start", interrupted)
    with pytest.raises(error):
        tw.weave(reduced, reduced, strategy=strategy)
    monkeypatch.setattr(Worker, "start", start)
    assert engine().interception.current() is None
    for _ in range(2):
        assert tw.weave(reduced, reduced, strategy=strategy).tolist() == [3, 3]
