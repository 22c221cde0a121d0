"""Every script of a known cause, watched live: the first cause is right, and the line is the marked one."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchweave as tw

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from watch_scripts import all_scripts, ready, watch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("script", all_scripts(), ids=lambda script: script.name)
def test_the_first_cause_and_its_line(script):
    """Catches a wrong cause, a line beside the marked one, and a script that fails."""
    row = watch(ready(script), script, limit_s=100)
    assert not row.error, row
    assert row.found in row.expected, row
    if row.marked:
        assert row.line in row.marked, row


def test_a_block_is_watched_in_this_process():
    """Catches a watch that leaves the device, or the process, unlike before."""
    rows = torch.rand(16, 1_000_000, device="cuda")
    side = torch.cuda.Stream()
    with tw.watch() as watched:
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(20):
            with torch.cuda.stream(side):
                torch.cumsum(rows, 1)
            torch.cumsum(rows, 1)
        torch.cuda.current_stream().wait_stream(side)
    found = watched.report().diagnosis
    assert found.verdict == "overlapped", found.sentence
    assert found.numbers.busy_ms > 0


def test_every_stream_of_the_program_gets_its_number():
    """Catches pointers of streams that are joined with the wrong number of the recorder."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    rows = torch.rand(16, 1_000_000, device="cuda")
    torch.cuda.synchronize()
    with tw.watch() as watched:
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cumsum(rows, 1)
        torch.cuda.synchronize()
    lanes = {(lane.device, lane.stream) for lane in watched.report().diagnosis.lanes}
    assert len(lanes) == 3


def fail(held):
    """Raise where the frame that is left holds a tensor."""
    raise KeyError(tuple(held.shape))


def fail_in_the_middle():
    """Raise where what is left holds the last reference to a tensor, which goes before the exception has arrived."""
    return torch.rand(1_000, device="cuda") + fail(torch.rand(1_000, device="cuda"))


def checkpointed_gradient():
    """Return the gradient of the sum of squares, which the backward computes again; early stop ends that by raising."""
    x = torch.arange(1_000.0, device="cuda", requires_grad=True)
    checkpoint(lambda value: ((value * 1.0) ** 2).relu(), x, use_reentrant=False).sum().backward()
    return x.grad


def test_exceptions_that_free_memory_arrive_as_themselves():
    """Catches a recorder that torch calls while an exception propagates: it was lost, and backward died of that."""
    expected = 2 * torch.arange(1_000.0, device="cuda")

    def both():
        with pytest.raises(KeyError, match="1000"):
            fail_in_the_middle()
        assert torch.equal(checkpointed_gradient(), expected)

    with tw.watch():
        both()
    # what was switched on for a process would stay on
    both()
