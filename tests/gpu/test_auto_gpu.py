"""On a GPU: `auto` measuring, weight gradients later, turns at `.tolist()`."""

import json
import os
import subprocess
import sys

import pytest
import torch
from layers import Exchange

import torchweave as tw
from torchweave.engine import later, reads
from torchweave.engine.pair import engine
from torchweave.engine.trial import REORDERED
from torchweave.measure.link import SimulatedLink
from torchweave.measure.sizes import CHUNKS
from torchweave.measure.subject import Subject, SubjectOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # free strands have two compute lanes, and gradients of one weight come from both
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

SMALL = {"layers": 3, "hidden": 512, "tokens": 512, "link_ms": 0.1}


@pytest.fixture(autouse=True)
def fresh():
    yield
    engine().close()
    engine().channels.lone_groups_are_slow = False


@pytest.mark.parametrize("strategy", ["turns", "streams", "auto"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_chunk_has_the_same_bits(chunk, strategy):
    """Catches a weight's gradient from memory that another kernel has overwritten, or added in another order."""
    subject = Subject(SubjectOptions(chunk, **SMALL), torch.device("cuda", 0))
    with subject.link:
        for _ in range(4):
            assert subject.is_bit_equal(lambda **pair: tw.weave(strategy=strategy, **pair))


def test_auto_tries_all_that_may_run_and_settles():
    """Catches events that are never read, and a trial that goes on for ever."""
    subject = Subject(SubjectOptions("moe", **SMALL), torch.device("cuda", 0))
    with subject.link:
        subject.settle(tw.weave)
        choice = tw.choices()[-1]
    assert set(choice.times_ms) - {REORDERED} == {"turns", "streams", "serial"}
    assert all(ms > 0.05 for ms in choice.times_ms.values())
    assert choice.strategy in choice.times_ms


def test_weights_wait_for_the_next_communication():
    """Catches a backward that computes them where autograd would: nothing here would then have been measured."""
    put_off = []
    plain = later._compute

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(256, 256)

        def forward(self, x):
            return Exchange.apply(torch.tanh(self.linear(x)))

    chunk = torch.nn.Sequential(Layer(), Layer(), Layer()).cuda()
    engine().channels.lone_groups_are_slow = True

    def run(strategy):
        x, y = (torch.randn(64, 256, device="cuda", generator=generator) for _ in range(2))
        loss = chunk(y).square().mean()
        tw.weave(lambda: chunk(x), lambda: loss.backward(), strategy=strategy, kind="later")

    def compute(piece):
        put_off.append(piece.product.node.name())
        plain(piece)

    generator = torch.Generator("cuda").manual_seed(1)
    with SimulatedLink(200.0, sms=4), pytest.MonkeyPatch.context() as patch:
        run("turns")
        patch.setattr("torchweave.engine.later._compute", compute)
        run("turns")
    # where torch does not say which saved tensors have hooks, they stay where they were
    assert len(put_off) == (3 if later.TELLS_SAVED_HOOKS else 0)


def test_a_copy_to_the_host_is_right():
    """Catches numbers that are read before they are there."""
    numbers = torch.arange(1000, device="cuda", dtype=torch.int64)
    torch.cuda._sleep(20_000_000)
    target, is_there = reads.begin_read(numbers * 2)
    assert not is_there()
    reads.finish_read(is_there, 10.0, "forward")
    assert target.tolist() == list(range(0, 2000, 2))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_bench_runs(chunk):
    """Catches a benchmark that would first fail when it is wanted."""
    words = ["--chunk", chunk, "--ranks", "1", "--layers", "2", "--hidden", "512", "--tokens", "512", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torchweave", "bench", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(row["bit_equal"] for row in found["strategies"].values())
    assert found["serial_ms"] > 0
