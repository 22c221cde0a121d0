"""The simulated link on a group of one: what is delayed, what is not, and what is left behind."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from torchweave.errors import TorchweaveError, UsageError
from torchweave.measure.c10d import num_bytes, work_operations
from torchweave.measure.link import SimulatedLink

pytestmark = pytest.mark.timeout(60)

MEBI = torch.ones(1 << 18)  # 1 MiB
MS_PER_MEBI = 20.0
GBPS = MEBI.nbytes * 8 / MS_PER_MEBI / 1e6


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def link():
    with SimulatedLink(GBPS) as link:
        yield link
    assert not [thread for thread in threading.enumerate() if thread.name == "torchweave-link"]


def elapsed_ms(call):
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def fastest_ms(call):
    """Return the least of several times: a busy machine makes some of them long, and none of them short."""
    return min(elapsed_ms(call) for _ in range(10))


def all_to_all(async_op=False):
    out = torch.empty_like(MEBI)
    return out, dist.all_to_all_single(out, MEBI, async_op=async_op)


def test_a_collective_ends_when_its_bytes_can_have_come_over(link):
    out, _ = all_to_all()
    assert torch.equal(out, MEBI)
    (transfer,) = link.log.transfers
    assert transfer.operation == "alltoall_base_"
    assert transfer.num_bytes == MEBI.nbytes
    assert (transfer.end_ns - transfer.begin_ns) / 1e6 >= MS_PER_MEBI


def test_what_runs_beside_a_collective_hides_it(link):
    def waited_ms():
        _, work = all_to_all(async_op=True)
        time.sleep(MS_PER_MEBI * 1.5e-3)
        return elapsed_ms(work.wait)

    assert min(waited_ms() for _ in range(5)) < MS_PER_MEBI / 2


def test_collectives_of_one_group_follow_each_other(link):
    works = [all_to_all(async_op=True)[1] for _ in range(3)]
    for work in works:
        work.wait()
    first, second, third = sorted(link.log.transfers, key=lambda transfer: transfer.begin_ns)
    assert second.begin_ns == first.begin_ns + round(MS_PER_MEBI * 1e6)
    assert third.begin_ns == second.begin_ns + round(MS_PER_MEBI * 1e6)
    assert third.issue_ns < first.end_ns


def test_waiting_costs_no_processor(link):
    before = time.process_time()
    for _ in range(5):
        all_to_all()
    assert (time.process_time() - before) * 1e3 < 5 * MS_PER_MEBI / 4


def test_functional_collectives_are_delayed_and_right(link):
    def run():
        assert torch.equal(functional.all_reduce(MEBI, "sum", dist.group.WORLD) + 0, MEBI)

    assert elapsed_ms(run) >= MS_PER_MEBI


def test_a_future_completes_without_a_wait(link):
    _, work = all_to_all(async_op=True)
    work.get_future().wait()
    assert link.log.transfers[-1].end_ns <= time.perf_counter_ns()


def test_a_wait_has_its_own_time_limit(link):

    _, work = all_to_all(async_op=True)
    work.wait(timedelta(seconds=5))


def test_a_barrier_moves_nothing(link):
    dist.barrier()
    assert fastest_ms(dist.barrier) < MS_PER_MEBI / 2
    assert not link.log.transfers


def test_mute_returns_at_once_and_leaves_outputs_alone(link):
    out = torch.full_like(MEBI, 7.0)
    with link.mute():
        assert fastest_ms(lambda: dist.all_to_all_single(out, MEBI)) < MS_PER_MEBI / 2
        work = dist.all_reduce(out, async_op=True)
        assert work.is_completed()
        assert work.get_future().done()
    assert (out == 7.0).all()


def test_mute_still_sends_what_may_say_how_much_is_computed(link):
    """Catches a model that reads counts from a buffer which nobody filled."""
    counts, theirs = torch.arange(4), torch.full((4,), 7)
    with link.mute():
        dist.all_to_all_single(theirs, counts)
    assert torch.equal(theirs, counts)


def test_pause_delays_nothing_and_is_right(link):
    with link.pause():
        assert fastest_ms(all_to_all) < MS_PER_MEBI / 2


def test_a_recording_is_replayed_delayed_in_order(link):
    with link.pause(), link.record() as recording:
        all_to_all()
        dist.all_reduce(MEBI.clone())
    assert [call.operation.name for call in recording.calls] == ["alltoall_base_", "allreduce_"]
    assert recording.num_bytes == 2 * MEBI.nbytes
    assert elapsed_ms(recording.replay) >= 2 * MS_PER_MEBI


def test_without_a_speed_nothing_is_delayed():
    with SimulatedLink(None) as link:
        assert fastest_ms(all_to_all) < MS_PER_MEBI / 2
        assert str(link) == "none: GLOO"


def test_after_the_block_collectives_are_untouched():
    with SimulatedLink(GBPS):
        pass
    assert fastest_ms(all_to_all) < MS_PER_MEBI / 2


def test_two_links_at_once_are_refused(link):
    with pytest.raises(TorchweaveError, match="One simulated link at a time"), SimulatedLink(1.0):
        pass
    assert elapsed_ms(all_to_all) >= MS_PER_MEBI


@pytest.mark.parametrize(("gbps", "sms"), [(0.0, 1), (-1.0, 1), (float("inf"), 1), (float("nan"), 1), (1.0, 0)])
def test_impossible_links_are_refused(gbps, sms):
    with pytest.raises(UsageError):
        SimulatedLink(gbps, sms=sms)


def test_every_operation_with_a_work_is_seen():
    names = {operation.name for operation in work_operations()}
    assert {"alltoall_base_", "allreduce_", "_allgather_base_", "send", "recv_", "barrier"} <= names


def test_bytes_are_the_larger_of_read_and_written():
    small, large = torch.ones(2), torch.ones(8)
    assert num_bytes((large, small)) == large.nbytes
    assert num_bytes(([[small, small]], [large])) == large.nbytes
    assert num_bytes(([small, large],)) == small.nbytes + large.nbytes


def test_whoever_watches_waits_sees_those_of_a_link(link, monkeypatch):
    from torch._C import _distributed_c10d as c10d

    seen, wait = [], c10d.Work.wait
    monkeypatch.setattr(c10d.Work, "wait", lambda work, *args: seen.append(work) or wait(work, *args))
    all_to_all()
    assert len(seen) == 1


def test_torch_is_as_before_after_the_block():
    from torch._C import _distributed_c10d as c10d

    before = dict(vars(c10d.PythonCallbackWork))
    with SimulatedLink(1.0):
        assert "wait" not in vars(c10d.PythonCallbackWork)
    assert dict(vars(c10d.PythonCallbackWork)) == before
