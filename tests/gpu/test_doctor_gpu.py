"""The doctor's measurement: in time, in range, and right where the answer is known."""

import json
import os
import subprocess
import sys

import pytest
import torch

from torchweave.doctor.look import look

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_what_can_overlap_is_measured():
    """Catches a measurement that hangs, that is no ratio, or that sees no overlap on a device that has it."""
    machine = look()
    measured = machine.measured
    assert measured is not None, machine.measure_error
    assert measured.seconds < 60
    assert 0.5 < measured.launch_us < 200
    assert 0.4 < measured.kernels < 0.8, "two kernels of 16 blocks have room for each other"
    assert 0.4 < measured.copies < 0.9
    assert (measured.collective is None) == (torch.cuda.device_count() < 2)


def test_blocking_launches_show():
    """Catches a ratio that is low whatever the device does."""
    words = [sys.executable, "-c", "from torchweave.doctor import measure as m; print(m._kernels())"]
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    found = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert float(found.stdout) > 0.9


def test_the_driver_is_asked():
    """Catches an attribute of another number."""
    words = [sys.executable, "-m", "torchweave.doctor.probe"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["driver"].startswith("CUDA ")
    assert found["devices"]
    assert all(1 <= device["copy_engines"] <= 16 for device in found["devices"])
