"""The script for two GPUs, tried out with gloo: every part runs, and one that fails stops no other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "two_gpu_pipeline.py"

pytestmark = [pytest.mark.long, pytest.mark.timeout(280)]


def rehearse(folder, *parts, ends_well=True, **environment):
    """Rehearse some parts; return what the result says of them."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--out", str(folder), "--rehearse", "--parts", *parts],
        capture_output=True,
        text=True,
        timeout=270,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
    )
    assert (done.returncode == 0) == ends_well, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads((folder / "two_gpu_pipeline_rehearsal.json").read_text())
    assert result["rehearsal"]
    assert "times mean nothing" in result["what"]
    assert list(result["parts"]) == list(parts)
    return result["parts"]


def test_steps_and_bubbles(tmp_path):
    found = rehearse(tmp_path, "experts", "pipelines", "transfers", "bubbles")
    assert all(row["bit_equal"] for part in ("experts", "pipelines") for row in found[part]["rows"]), found
    for row in found["pipelines"]["rows"]:
        assert row["losses"]["dualpipe turns"] == pytest.approx(row["losses"]["1f1b serial"], rel=1e-5)
    assert len(found["bubbles"]["rows"]) == 8
    assert all(row["recorded_ms"] > 0 for row in found["bubbles"]["rows"])
    assert all(path.stat().st_size < 300_000 for path in tmp_path.glob("*.json.gz"))


def test_a_part_that_fails_is_written_down_and_the_next_goes_on(tmp_path):
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "dualpipe.py").write_text("raise ImportError('planted here')\n")
    path = os.pathsep.join(filter(None, [str(stub), os.environ.get("PYTHONPATH")]))
    found = rehearse(tmp_path, "deepseek", "torch", ends_well=False, PYTHONPATH=path)
    assert found["deepseek"]["status"] == "failed"
    assert any("planted here" in error for error in found["deepseek"]["errors"])
    assert found["torch"]["status"] == "done"
    assert all(row["bit_equal"] for row in found["torch"]["rows"]), found
