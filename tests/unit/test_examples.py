"""The examples run, and say what to do where they cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, *words, launcher=()):
    """Run an example as its users do, without a GPU; `launcher` are the interpreter's words before its path."""
    command = [sys.executable, *launcher, str(EXAMPLES / name), *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


def test_stream_timing_reads_both_clocks_on_a_cpu():
    result = run_example("stream_timing.py", "--size", "64", "--products", "3")
    assert result.returncode == 0, result.stderr
    assert "no CUDA device" in result.stdout
    assert "no other device" in result.stdout


def test_naive_overlap_without_cuda_says_what_to_do():
    result = run_example("naive_overlap.py")
    assert result.returncode == 2
    assert "woven_overlap.py" in result.stderr
    assert result.stdout == ""


def test_naive_overlap_counts_the_time_in_which_two_streams_worked(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import naive_overlap

    def kernel(stream, begin_us, lasted_us):
        return {"cat": "kernel", "ts": begin_us, "dur": lasted_us, "args": {"stream": stream}}

    events = [kernel(7, 0, 100), kernel(7, 100, 50.5), kernel(20, 140, 30), {"cat": "cpu_op", "ts": 0, "dur": 9}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    naive_overlap.report(path)
    assert capsys.readouterr().out.splitlines() == [
        "stream 7: 2 kernels, busy 0.150 ms",
        "stream 20: 1 kernels, busy 0.030 ms",
        "time in which two streams worked at once: 0.011 ms of 0.180 ms",
    ]


def test_the_chunk_is_a_plain_module_whose_gradients_are_right(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from moe_chunk import make_chunk

    torch.manual_seed(0)
    chunk = make_chunk(layers=1, hidden=4).double()
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(chunk, x)
    source = (EXAMPLES / "moe_chunk.py").read_text()
    assert "import torchweave" not in source
    assert "from torchweave" not in source


@pytest.mark.parametrize("ranks", [1, 2])
def test_woven_overlap_is_equal_to_serial(ranks):
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    small = ("--layers=2", "--hidden=16", "--tokens=32", "--steps=2")
    result = run_example("woven_overlap.py", *small, launcher=() if ranks == 1 else torchrun)
    assert result.returncode == 0, result.stderr
    assert "from serial: 0\n" in result.stdout


def test_torch_dualpipev_is_equal_to_the_schedule_alone():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    small = ("--layers=1", "--hidden=16", "--tokens=16", "--microbatches=4", "--steps=2", "--strategy=turns")
    result = run_example("torch_dualpipev.py", *small, launcher=torchrun)
    assert result.returncode == 0, result.stderr
    assert "5 pairs a step on rank 0" in result.stdout
    assert "from the schedule alone: 0\n" in result.stdout


def test_torch_dualpipev_without_torchrun_says_what_to_do():
    result = run_example("torch_dualpipev.py")
    assert result.returncode == 2
    assert "torchrun" in result.stderr
    assert "Traceback" not in result.stderr
