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
    # an overlapped window lists no causes, though a little is lost in it
    assert "Gone" not in text
    assert "No causes are listed after: what was lost (13% of what was possible) is below the threshold (15%)" in text
    assert main(["compare", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["after"]["verdict"] == "overlapped"
    assert {row["after_ms"] for row in found["causes"]} == {None}


def test_compare_names_what_is_gone_and_new(capsys):
    folder = RANKS.parent / "causes"
    files = [str(folder / f"{name}.full.json.gz") for name in ("item_each_step", "wide_wait")]
    assert main(["compare", *files]) == 0
    text = capsys.readouterr().out
    assert "Gone: host_sync" in text
    assert "New: " in text


def test_a_folder_can_hold_several_jobs_and_other_json(capsys):
    assert main(["why", str(RANKS), "--json"]) == 1
    out = capsys.readouterr()
    found = {Path(row["file"]).name: row for row in json.loads(out.out)}
    assert len(found) == 5
    assert "truth.json" in out.err
    causes = {name: [cause["cause"] for cause in row["causes"]][:1] for name, row in found.items()}
    assert causes["late_peer.full.rank0.json.gz"] == ["late_peer"]
    assert causes["late_peer.full.rank1.json.gz"] == ["wide_dependency"]
    assert causes["ok_async_gather.full.rank0.json.gz"] == []
    texts = json.loads(out.out)[0]["between_ranks"]
    assert any(text.startswith("Rank 0 is there 4 times: ddp_one_bucket") for text in texts)
    assert any("Read together, by their names: late_peer.full.rank0.json.gz, late_peer" in text for text in texts)
    assert all(text.startswith("late_peer.full.rank*.json.gz: ") for text in texts[2:])


def test_a_rank_that_is_there_twice_is_told_by_file_name(tmp_path, capsys):
    for name in ("first.json.gz", "second.json.gz"):
        shutil.copy(RANKS / "late_peer.full.rank0.json.gz", tmp_path / name)
    main(["why", str(tmp_path)])
    text = " ".join(capsys.readouterr().out.split())
    assert "Rank 0 is there 2 times: first.json.gz, second.json.gz. So this folder is not one job." in text


def test_ranks_of_two_jobs_are_told_by_file_name(tmp_path, capsys):
    shutil.copy(RANKS / "late_peer.full.rank1.json.gz", tmp_path)
    shutil.copy(RANKS / "sync_collective.plain.rank0.json.gz", tmp_path)
    main(["why", str(tmp_path)])
    text = " ".join(capsys.readouterr().out.split())
    assert "They may be of different jobs, or of different steps" in text
    assert "sync_collective.plain.rank0.json.gz, late_peer.full.rank1.json.gz" in text


def _cut(path: Path, *, keep_first: bool) -> None:
    """Leave half of a rank's trace, split at the start of its middle collective."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    starts = [e["ts"] for e in trace["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"]]
    middle = sorted(starts)[len(starts) // 2]
    kept = [e for e in trace["traceEvents"] if "ts" not in e or (e["ts"] < middle) == keep_first]
    path.write_bytes(gzip.compress(json.dumps({**trace, "traceEvents": kept}).encode()))


@pytest.mark.parametrize("keep_first", [True, False])
def test_a_peer_whose_trace_is_cut_leaves_the_estimate(job, capsys, keep_first):
    """Catches collectives that no other trace holds counted as ones for which no one came late."""
    _cut(job / "late_peer.full.rank1.json.gz", keep_first=keep_first)
    assert main(["why", str(job), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)[0]["causes"]
    assert found[0]["cause"] == "late_peer"
    assert found[0]["lost_ms"] > 8
