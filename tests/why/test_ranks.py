"""Ranks of one job: clocks, who came late, and what two traces of one program differ in."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from torchweave.cli.main import main
from torchweave.diagnose.clocks import meet
from torchweave.trace.read import read

RANKS = Path(__file__).parents[1] / "traces" / "ranks"
WEAVE = Path(__file__).parents[1] / "traces" / "weave"


@pytest.fixture
def job(tmp_path):
    for rank in (0, 1):
        shutil.copy(RANKS / f"late_peer.full.rank{rank}.json.gz", tmp_path)
    return tmp_path


def test_a_folder_of_ranks_shows_the_late_one(job, capsys):
    assert main(["why", str(job), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in found] == [0, 1]
    assert found[0]["causes"][0]["cause"] == "late_peer"
    assert found[0]["causes"][0]["certainty"] == "shown"
    assert found[1]["causes"][0]["cause"] == "wide_dependency"
    assert any("Rank 1 came last to 5 of 5" in text for text in found[0]["between_ranks"])


def test_a_shifted_clock_is_aligned(job):
    path = job / "late_peer.full.rank1.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    for event in trace["traceEvents"]:
        if "ts" in event:
            event["ts"] += 123_456.0
    shifted = job / "shifted.json"
    shifted.write_text(json.dumps(trace))
    ranks = [read(job / f"late_peer.full.rank{rank}.json.gz") for rank in (0, 1)]
    straight, crooked = meet(ranks), meet([ranks[0], read(shifted)])
    assert crooked.offset_ns[1] - straight.offset_ns[1] == pytest.approx(-123_456_000, abs=1000)
    assert crooked.waited_ms == pytest.approx(straight.waited_ms, abs=0.01)
    assert straight.spread_us < 5


def test_ranks_that_begin_at_another_collective_are_matched(job):
    path = job / "late_peer.full.rank1.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace["traceEvents"]
    first = min(event["ts"] for event in events if event.get("cat") == "kernel" and "nccl" in event["name"])
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("ts", 0) != first]
    (job / "later.json").write_text(json.dumps(trace))
    found = meet([read(job / "late_peer.full.rank0.json.gz"), read(job / "later.json")])
    assert found.num_matched == 4
    assert found.spread_us < 5


def test_an_empty_folder_is_unreadable(tmp_path):
    assert main(["why", str(tmp_path)]) == 3


def test_compare_says_what_a_change_did(capsys):
    files = [str(WEAVE / name) for name in ("moe_serial.json.gz", "moe_woven_turns.json.gz")]
    assert main(["compare", *files]) == 0
    text = capsys.readouterr().out
    assert "serial before, overlapped after" in text
    assert "Gone: same_stream" in text
    assert main(["compare", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["after"]["verdict"] == "overlapped"
