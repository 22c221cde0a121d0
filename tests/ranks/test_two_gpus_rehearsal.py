"""`benchmarks/two_gpus.py`, rehearsed over gloo: rows that fail are written down, and the others are measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PLANTED = """
import os, sys
sys.path.insert(0, {benchmarks!r})
import two_gpus

plain = two_gpus.Run._measure

def measure(run, number, row):
    if number == 1:
        raise ZeroDivisionError("planted on both")
    if number == 3 and run.rank == 1:
        os._exit(9)
    return plain(run, number, row)

two_gpus.Run._measure = measure
two_gpus.main()
"""


def test_failures_cost_their_row_alone(tmp_path):
    """Catches a failure, alike or alone, that takes measured rows with it, or keeps the rest from being measured."""
    script, out = tmp_path / "planted.py", tmp_path / "out"
    script.write_text(PLANTED.format(benchmarks=str(ROOT / "benchmarks")))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += [str(script), "--out", str(out), "--rehearse", "--rounds", "2", "--rows", "1", "11", "3", "6", "10"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "two_gpus.json").read_text())
    assert [row["number"] for row in result["rows"]] == [11, 6, 10]
    assert [one["number"] for one in result["failed"]] == [1, 3]
    assert result["failed"][0]["error"] == ["ZeroDivisionError: planted on both"] * 2
    assert "the run was started again" in result["failed"][1]["error"]
    assert result["under_way"] is None
    assert set(result["rows"][0]["strategies"]) == {"turns", "streams", "auto", "two_streams", "barrier"}
    assert all(way["bit_equal"] for row in result["rows"] for way in row["strategies"].values())
    assert result["why_script"]["exit_code"] == 0
