"""The adapters in their frameworks' own runners, on two GPUs over NCCL: to the bit what these compute alone."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "two_gpu_pipeline.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize(
    ("part", "package", "cases"), [("torch", "torch", 2), ("deepseek", "dualpipe", 1), ("megatron", "megatron", 2)]
)
def test_woven_pairs_are_those_of_the_framework_alone(part, package, cases, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--out", str(tmp_path), "--small", "--parts", part],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = json.loads((tmp_path / "two_gpu_pipeline.json").read_text())["parts"][part]["rows"]
    assert len(rows) == cases
    for row in rows:
        assert row["bit_equal"], row
        assert len({str(losses) for losses in row["losses"].values()}) == 1, row
