"""`torchweave why SCRIPT` under torchrun: a recording of each rank, and one report of both."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_both_ranks_are_explained():
    """Catches a rank without a recording, and NCCL's kernels that are taken for computation."""
    from two_gpus import why_script

    said = why_script(2)
    assert said.get("exit_code") == 0, said
    assert sorted(one["rank"] for one in said["ranks"]) == [0, 1]
    for one in said["ranks"]:
        assert one["communication"]["busy_ms"] > 0, one
        # nothing in the script overlaps
        assert one["communication"]["hidden_share"] < 0.1, one
        assert one["verdict"] == "serial", one
        assert one["causes"], one
