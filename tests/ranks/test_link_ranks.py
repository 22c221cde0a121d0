"""The simulated link between two processes over gloo: data is right, every rank is delayed, point-to-point too."""

import multiprocessing
import time
import traceback

import pytest
import torch
import torch.distributed as dist

from torchweave.measure.link import SimulatedLink

pytestmark = pytest.mark.timeout(120)

NUM_FLOATS = 1 << 16
MS = 20.0
GBPS = NUM_FLOATS * 4 * 8 / MS / 1e6


def exchange_all(rank):
    mine = torch.full((NUM_FLOATS,), float(rank))
    out = torch.empty_like(mine)
    with SimulatedLink(GBPS) as link:
        dist.barrier()
        dist.all_to_all_single(out, mine)
        assert torch.equal(out, torch.arange(2.0).repeat_interleave(NUM_FLOATS // 2))
        total = mine.clone()
        dist.all_reduce(total)
        assert (total == 1.0).all()
        gathered = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(gathered, mine)
        assert (gathered[1] == 1.0).all()
        scattered = torch.empty_like(mine)
        dist.scatter(scattered, [mine + 3, mine + 4] if rank == 0 else None)
        assert (scattered == 3.0 + rank).all()
        durations = [(transfer.end_ns - transfer.begin_ns) / 1e6 for transfer in link.log.transfers]
    assert len(durations) == 4
    assert min(durations) >= MS


def point_to_point(rank):
    mine, theirs = torch.full((NUM_FLOATS,), float(rank)), torch.empty(NUM_FLOATS)
    with SimulatedLink(GBPS) as link, link.record() as recording:
        dist.barrier()
        begin = time.perf_counter()
        batch = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert (time.perf_counter() - begin) * 1e3 >= 2 * MS
        assert (theirs == 1 - rank).all()
    with SimulatedLink(GBPS) as link:
        recording.replay()
        assert len(link.log.transfers) == 2


def late_peer(rank):
    """A collective ends when it has really ended, however fast the link is, and an early receive blocks no other."""
    out = torch.empty(NUM_FLOATS)
    with SimulatedLink(1000.0) as link:
        dist.barrier()
        early = dist.irecv(torch.empty(4), 1 - rank, tag=7)
        if rank == 1:
            time.sleep(0.1)
        begin = time.perf_counter()
        dist.all_to_all_single(out, torch.ones(NUM_FLOATS))
        waited_ms = (time.perf_counter() - begin) * 1e3
        late = dist.isend(torch.ones(4), 1 - rank, tag=7)
        early.wait()
        late.wait()
        (transfer,) = [transfer for transfer in link.log.transfers if transfer.operation == "alltoall_base_"]
        if rank == 0:
            assert waited_ms >= 80
            assert transfer.end_ns - transfer.begin_ns >= 80e6


def only_lone_groups(rank):
    """A link under a stage's own collectives leaves what crosses between ranks to the backend."""
    mine, out = torch.ones(NUM_FLOATS), torch.empty(NUM_FLOATS)
    alone = dist.new_subgroups(1)[0]
    with SimulatedLink(GBPS, only_lone_groups=True) as link:
        dist.all_reduce(mine)
        assert (mine == 2).all()
        assert not link.log.transfers
        dist.all_to_all_single(out, mine, group=alone)
        assert len(link.log.transfers) == 1


def run_rank(scenario, rank, store_path, results):
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(store_path, 2), rank=rank, world_size=2)
        scenario(rank)
        dist.destroy_process_group()
        results.put("")
    except BaseException:
        results.put(f"rank {rank}:\n{traceback.format_exc()}")


@pytest.mark.parametrize("scenario", [exchange_all, point_to_point, late_peer, only_lone_groups])
def test_two_ranks(scenario, tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(scenario, rank, str(tmp_path / "store"), results), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        failures = [results.get(timeout=60) for _ in ranks]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    assert not any(failures), "\n".join(failures)
