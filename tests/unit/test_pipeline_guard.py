"""How a rank waits on its host for what a GPU does: it notices the end at once, and asks the store seldom."""

import json
import threading

import pytest
import torch

from torchweave.errors import PipelineError
from torchweave.pipeline import faults
from torchweave.pipeline.groups import group_limit_s

ENDS_AFTER_S = 0.5


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class CountingStore:
    """A store in which a note may appear."""

    def __init__(self, clock, note=None, after_s=0.0):
        self.clock, self.note, self.after_s, self.num_checks = clock, note, after_s, 0

    def check(self, names):
        self.num_checks += 1
        return self.note is not None and self.clock.now >= self.after_s

    def get(self, name):
        return self.note.encode()

    def compare_set(self, name, expected, note):
        return note.encode()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(faults, "time", clock)
    return clock


def guard(store, limit_s=10.0):
    return faults.Guard(None, store, limit_s, torch.device("cpu"))


def test_the_end_of_a_step_is_noticed_within_a_millisecond_and_the_store_is_asked_seldom(clock):
    store = CountingStore(clock)
    guard(store).wait_on_host(lambda: clock.now >= ENDS_AFTER_S, None)
    assert clock.now - ENDS_AFTER_S <= 0.0011
    assert store.num_checks <= ENDS_AFTER_S / 0.02 + 1


def test_another_ranks_failure_ends_the_wait(clock):
    note = json.dumps([faults.Where(3, 1, "1F2", 2), "ValueError: planted here"])
    store = CountingStore(clock, note, after_s=0.2)
    with pytest.raises(PipelineError) as caught:
        guard(store).wait_on_host(lambda: False, None)
    assert (caught.value.rank, caught.value.action) == (3, "1F2")
    assert clock.now <= 0.25


def test_a_silent_rank_is_named_when_the_limit_is_over(clock):
    awaited = faults.Where(1, 1, "1F2", 2)
    with pytest.raises(PipelineError, match="1F2 on rank 1"):
        guard(CountingStore(clock), limit_s=1.0).wait_on_host(lambda: False, awaited)
    assert 1.0 <= clock.now <= 1.05


class Blocked:
    """A host that its GPU holds until the connections are closed."""

    def __init__(self, monkeypatch):
        self.freed = threading.Event()
        monkeypatch.setattr(faults, "_LOOKOUT_S", 0.01)
        monkeypatch.setattr(faults.Guard, "_break", lambda _: self.freed.set())

    def wait(self):
        return self.freed.wait(30)


def gpu_guard(store):
    return faults.Guard(None, store, 10.0, torch.device("cuda"))


def test_a_host_that_its_gpu_blocks_is_freed_where_another_rank_has_failed(monkeypatch):
    note = json.dumps([faults.Where(3, 1, "1F2", 2), "ValueError: planted here"])
    blocked = Blocked(monkeypatch)
    found = gpu_guard(CountingStore(Clock(), note))
    # what the host goes on with is of no use, whether it notices or not
    with pytest.raises(PipelineError, match="1F2") as caught, found.lookout():
        assert blocked.wait()
    assert caught.value.rank == 3
    here = faults.Where(0, 0, "0F4", 4)
    with pytest.raises(PipelineError, match="1F2"), found.lookout(), found.at(here):
        raise RuntimeError("the data was garbage")


class Transfer:
    """A transfer on a GPU; like one over a simulated link it never says that it is complete."""

    def __init__(self, error=None):
        self.error = error

    def is_completed(self):
        return False

    def exception(self):
        return self.error

    def wait(self):
        return True


def test_a_transfer_has_ended_where_the_stream_that_waits_for_it_has(clock, monkeypatch):
    monkeypatch.setattr(faults, "mark", lambda _: lambda: clock.now >= ENDS_AFTER_S)
    gpu_guard(CountingStore(clock)).wait(Transfer(), None, on_host=True)
    assert ENDS_AFTER_S <= clock.now <= ENDS_AFTER_S + 0.0011


def test_a_transfer_that_ended_in_an_error_is_no_success(monkeypatch):
    monkeypatch.setattr(faults, "mark", lambda _: lambda: False)
    monkeypatch.setattr(faults.Guard, "_break", lambda _: None)
    awaited = faults.Where(1, 1, "1F2", 2)
    transfer = Transfer(RuntimeError("remote process exited"))
    with pytest.raises(PipelineError, match="remote process exited") as caught:
        gpu_guard(CountingStore(Clock())).wait(transfer, awaited, on_host=True)
    assert caught.value.rank == 1


def test_the_lookout_ends_with_the_step(monkeypatch):
    Blocked(monkeypatch)
    with gpu_guard(CountingStore(Clock())).lookout():
        assert any(thread.name == "torchweave lookout" for thread in threading.enumerate())
    assert not any(thread.name == "torchweave lookout" for thread in threading.enumerate())


def test_nccls_watchdog_leaves_a_rank_the_time_to_say_who_is_silent():
    """It counts from where an operation was queued, and a rank's own wait from where the whole step was."""
    assert group_limit_s(60.0, over_nccl=False) == 60.0
    assert group_limit_s(60.0, over_nccl=True) > 2 * 60.0
