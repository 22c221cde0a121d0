"""Pipelines on two GPUs over NCCL: the losses of one process, also after a kill; woven steps are serial ones."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipelines import Even, data, mse
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchweave as tw
from torchweave.errors import PipelineError

ROOT = Path(__file__).parents[3]
EXAMPLE, BENCHMARK = ROOT / "examples" / "train_moe.py", ROOT / "benchmarks" / "two_gpu_pipeline.py"
SMALL = ["--layers", "4", "--batch", "1", "--sequence", "64", "--microbatches", "4", "--experts", "2"]
LIMIT_S, COUNT = 20, 4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def command(ranks, *words):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, str(EXAMPLE), *SMALL, "--limit-s", str(LIMIT_S), *words]


def train(ranks, *words):
    """Run the example to its end; return what it printed."""
    done = subprocess.run(command(ranks, *words), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses(path):
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The losses of one process on one GPU."""
    log = tmp_path_factory.mktemp("one") / "log.json"
    assert "1f1b, 1 x 1 ranks, cuda: loss" in train(1, "--schedule", "1f1b", "--steps", "6", "--json", str(log))
    return losses(log)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_two_ranks_have_the_losses_of_one_process(one_process, schedule, tmp_path):
    log = tmp_path / "log.json"
    told = train(2, "--schedule", schedule, "--pp", "2", "--steps", "6", "--json", str(log))
    assert f"{schedule}, 2 x 1 ranks, cuda: loss" in told
    assert losses(log) == one_process


def test_dualpipe_rounds_otherwise_and_nothing_else(one_process, tmp_path):
    log = tmp_path / "log.json"
    train(2, "--schedule", "dualpipe", "--pp", "2", "--steps", "6", "--json", str(log))
    # two halves of the microbatches are added up
    assert losses(log) == pytest.approx(one_process, rel=1e-4)


def test_experts_on_both_ranks_train_alike_woven_and_serial(tmp_path):
    found = {}
    for strategy in ("serial", "turns", "auto"):
        log = tmp_path / f"{strategy}.json"
        words = ["--schedule", "dualpipev", "--ep", "2", "--steps", "6", "--strategy", strategy]
        assert "communication hidden" in train(2, *words, "--json", str(log))
        found[strategy] = losses(log)
    assert found["turns"] == found["auto"] == found["serial"]
    assert found["serial"][-1] < found["serial"][0]


def start_ranks(words):
    """Start two ranks as torchrun would, each a process of its own that can be killed alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            command(1, *words),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


def test_a_run_that_is_killed_goes_on_with_the_same_losses(one_process, tmp_path):
    log, folder = tmp_path / "log.json", tmp_path / "checkpoints"
    words = ["--schedule", "dualpipev", "--pp", "2", "--json", str(log), "--checkpoints", str(folder)]
    # far more steps than it will get to
    survivor, victim = start_ranks([*words, "--steps", "100000", "--save-every", "2"])
    try:
        end = time.monotonic() + 120
        while not (log.exists() and len(log.read_text().splitlines()) >= 3 and any(folder.glob("*/.metadata"))):
            assert survivor.poll() is None, survivor.stderr.read()[-4000:]
            assert time.monotonic() < end, "the run did not get to its third step"
            time.sleep(0.02)
        victim.kill()
        # a GPU's wait does not hold the host: the other rank ends when its limit is over, and not before
        told = survivor.communicate(timeout=4 * LIMIT_S)[1]
    finally:
        for process in (survivor, victim):
            process.kill()
            process.wait()
            process.stderr.close()
    # killed while it saved a checkpoint, NCCL's watchdog ends it: by a signal
    assert survivor.returncode != 0
    if survivor.returncode == 1:
        assert "PipelineError" in told, told[-4000:]
        assert "rank 1" in told, told[-4000:]
    for checkpoint in sorted(folder.glob("step-*")):  # as if it had been killed soon after its first checkpoint
        if checkpoint.name != "step-000002":
            shutil.rmtree(checkpoint)
    assert "going on after step 2" in train(2, *words, "--steps", "6", "--save-every", "2")
    assert losses(log) == one_process
    # and the checkpoint of two ranks is one of a single process, too
    train(1, "--schedule", "zbv", "--steps", "6", "--json", str(log), "--checkpoints", str(folder))
    assert losses(log) == one_process


def enter(rank, folder, device_type):
    """Enter a group of two ranks; with `cpu` a test's functions can be tried out where there are no GPUs."""
    device = torch.device(device_type, rank)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), 2)
    options = {"device_id": device} if device_type == "cuda" else {}
    dist.init_process_group("nccl" if options else "gloo", store=store, rank=rank, world_size=2, **options)


def gradients(wrap, strategy, own, device_type):
    """Return the gradients of some steps of a V on this rank alone, whose chunks are wrapped."""
    chunks = [wrap(Even(index).to(device_type)) for index in range(2)]
    pipeline = tw.pipeline.build(chunks, "dualpipev", group=own, strategy=strategy)
    found = []
    for number in range(3):
        x, y = (part.to(device_type) for part in data(COUNT, number + 10 * dist.get_rank()))
        pipeline.step(x, y, num_microbatches=COUNT, loss_fn=mse)
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            found.append(grad.clone())
            parameter.grad = None
    return found


def be_data_parallel(rank, folder, device_type):
    """Compare two ranks' gradients under DDP and FSDP2 with the mean of what the ranks have without."""
    enter(rank, folder, device_type)
    own, mesh = dist.new_subgroups(1)[0], init_device_mesh(device_type, (2,))

    def with_fsdp(module):
        fully_shard(module.inner, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    expected = gradients(lambda module: module, "serial", own, device_type)
    for grad in expected:
        dist.all_reduce(grad)
    for wrap in (DistributedDataParallel, with_fsdp):
        for strategy in ("serial", "turns", "auto"):
            found = gradients(wrap, strategy, own, device_type)
            torch.testing.assert_close(found, [grad / 2 for grad in expected], rtol=1e-5, atol=1e-7)
    dist.destroy_process_group()


def test_data_parallelism_over_nccl(tmp_path):
    """Catches a reduction that meets the other strand, or gradients that are read before they were reduced."""
    torch.multiprocessing.spawn(be_data_parallel, (tmp_path, "cuda"), 2)


class First(nn.Module):
    """A stage that may read a number of each microbatch: the host waits for all that its GPU was given before."""

    def __init__(self, reads):
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), reads

    def forward(self, x):
        y = self.linear(x)
        return y * float(y.detach().sum().item() < 1e9) if self.reads else y


class Trap(nn.Module):
    """A stage that raises in its fifth forward: the first of the second step of four microbatches."""

    def __init__(self):
        super().__init__()
        self.linear, self.left = nn.Linear(4, 4), 4

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise ValueError("planted here")
        return self.linear(x)


def fail_on_rank_1(rank, folder, device_type, reads):
    """Be a rank of a pipeline whose rank 1 raises; write down what this rank is told."""
    enter(rank, folder, device_type)
    module = (Trap() if rank else First(reads)).to(device_type)
    pipeline = tw.pipeline.build(module, "1f1b", limit_s=60.0)
    x = torch.ones(8, 4, device=device_type)
    told = []
    try:
        for _ in range(2):  # in the first step shapes are learnt, over the store: there a host waits for the other's
            pipeline.step(x, num_microbatches=4, loss_fn=lambda y: y.square().mean())
    except PipelineError as error:
        told = [error.rank, error.stage, error.action, error.microbatch, error.cause]
    (folder / f"told-{rank}").write_text(json.dumps(told))
    os._exit(0)  # a group whose connections are closed needs no order


@pytest.mark.parametrize("reads", [False, True], ids=["host ahead", "host blocked by its GPU"])
def test_an_exception_on_one_rank_is_every_ranks_error(reads, tmp_path):
    """Catches a rank that goes on to its limit, or to the end of its process, where the other one has said why."""
    torch.multiprocessing.spawn(fail_on_rank_1, (tmp_path, "cuda", reads), 2)
    for rank in range(2):
        *place, cause = json.loads((tmp_path / f"told-{rank}").read_text())
        assert place == [1, 1, "1F0", 0]
        assert "ValueError: planted here" in cause


def test_the_benchmarks_steps_are_equal_and_its_transfers_are_found(tmp_path):
    parts = ["experts", "pipelines", "transfers", "bubbles"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--out", str(tmp_path), "--small", "--parts", *parts],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "two_gpu_pipeline.json").read_text())["parts"]
    assert all(row["bit_equal"] for part in ("experts", "pipelines") for row in found[part]["rows"]), found
    for row in found["transfers"]["rows"]:
        assert row["transfers"] > 0
        assert row["matched"], row
    kept = list(tmp_path.glob("*.json.gz"))
    assert len(kept) == 2
    assert all(path.stat().st_size < 300_000 for path in kept)
