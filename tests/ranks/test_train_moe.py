"""The training example: the same losses for every schedule and for one process, also after a kill."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_moe.py"
SMALL = ["--layers", "4", "--batch", "1", "--sequence", "16", "--microbatches", "4", "--experts", "2"]

pytestmark = pytest.mark.timeout(240)


def command(ranks, *words):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, str(EXAMPLE), *SMALL, *words]


def environment():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def train(ranks, *words):
    """Run the example to its end; return its losses."""
    done = subprocess.run(command(ranks, *words), capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(path):
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The losses of one process, and of one that was stopped half way and goes on."""
    log = tmp_path_factory.mktemp("one") / "log.json"
    out = train(1, "--schedule", "1f1b", "--steps", "6", "--json", str(log))
    assert "1f1b, 1 x 1 ranks, cpu: loss" in out
    return losses(log)


def start_ranks(ranks, words):
    """Start the ranks as torchrun would, each a process of its own that can be killed alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**environment(), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            command(1, *words),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def test_a_run_that_is_killed_goes_on_with_the_same_losses(one_process, tmp_path):
    log, folder = tmp_path / "log.json", tmp_path / "checkpoints"
    words = ["--schedule", "dualpipev", "--pp", "2", "--json", str(log), "--checkpoints", str(folder)]
    # far more steps than it will get to
    survivor, victim = start_ranks(2, [*words, "--steps", "100000", "--save-every", "2"])
    try:
        end = time.monotonic() + 100
        while not (log.exists() and len(log.read_text().splitlines()) >= 3 and any(folder.glob("*/.metadata"))):
            assert survivor.poll() is None, survivor.stderr.read()
            assert time.monotonic() < end, "the run did not get to its third step"
            time.sleep(0.02)
        victim.kill()
        # the other rank ends by itself, and says who is gone
        told = survivor.communicate(timeout=60)[1]
    finally:
        for process in (survivor, victim):
            process.kill()
            process.wait()
            process.stderr.close()
    assert survivor.returncode == 1
    assert "Error" in told
    assert "rank 1" in told
    assert len(list(folder.glob("step-*"))) > 0
    for checkpoint in sorted(folder.glob("step-*")):  # as if it had been killed soon after its first checkpoint
        if checkpoint.name != "step-000002":
            shutil.rmtree(checkpoint)
    out = train(2, *words, "--steps", "6", "--save-every", "2")
    assert "going on after step 2" in out
    assert losses(log) == one_process
    # and the checkpoint of two ranks is one of a single process, too
    out = train(1, "--schedule", "zbv", "--steps", "6", "--json", str(log), "--checkpoints", str(folder))
    assert losses(log) == one_process


@pytest.mark.long
def test_dualpipe_with_experts_on_two_ranks_of_each_stage(one_process, tmp_path):
    log = tmp_path / "log.json"
    words = ["--schedule", "dualpipe", "--pp", "2", "--steps", "6", "--json", str(log)]
    train(2, *words)
    # two halves of the microbatches are added up: other roundings, nothing else
    assert losses(log) == pytest.approx(one_process, rel=1e-4)
    out = train(4, *words, "--ep", "2", "--strategy", "turns")
    assert "communication hidden" in out
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert found[-1]["loss"] < found[0]["loss"]
    assert 0 < found[-1]["hidden_share"] <= 1


def test_wrong_sizes_are_refused_in_one_line():
    for words, remedy in (
        (["--layers", "1", "--schedule", "zbv"], "--layers 2"),
        (["--pp", "2"], "torchrun"),
        (["--steps", "0"], "--steps is at least 1"),
        (["--lr", "nan"], "--lr is a number above 0"),
        (["--json", "/no/such/folder/losses.json"], "choose a folder"),
        (["--checkpoints", "/dev/null/folder"], "choose another one"),
    ):
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), *words], capture_output=True, text=True, timeout=60, env=environment()
        )
        assert done.returncode == 2
        assert remedy in done.stderr
        assert "Traceback" not in done.stderr
