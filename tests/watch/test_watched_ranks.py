"""Ranks of one job meet in a folder: the first reports, who is missing is named, nobody waits for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchweave.errors import UsageError
from torchweave.record.ranks import announce, clean, fail, gather, job_of, recording_path

DRIVER = Path(__file__).parent / "driver.py"
PROGRAM = """\
import datetime, os, sys, time
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
for step in range(4):
    x = torch.ones(8) * rank
    if rank == 1:
        time.sleep(0.01)
    dist.all_reduce(x)
    if "die" in sys.argv and rank == 1 and step == 2:
        os._exit(13)
    print("sum", float(x.sum()))
dist.destroy_process_group()
"""


def variables(rank, world=2, **other):
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **other}  # fmt: skip


def job(rank, folder, world=2):
    return job_of(variables(rank, world), folder)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Start two ranks of the program under the made-up device, and return their endings."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path))
    (tmp_path / "job.py").write_text(PROGRAM)

    def launch(own, args=()):
        port = free_port()
        ranks = [
            subprocess.Popen(
                [sys.executable, str(DRIVER), "why", *own, "job.py", *args],
                env={**os.environ, **variables(rank, MASTER_PORT=port)}, cwd=tmp_path, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        return [(process.communicate(timeout=100), process.returncode) for process in ranks]

    return launch


def test_the_first_rank_reports_what_differs_and_keeps_the_recordings(launch, tmp_path):
    (first, code), (second, other) = launch(["--json", "--save", "runs"])
    assert (code, other) == (0, 0), (first[1], second[1])
    found = json.loads(first[0])
    assert [each["rank"] for each in found] == [0, 1]
    assert second[0] == ""
    assert first[1].count("sum 8.0") == 4
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["rank0.twr", "rank1.twr"]


def test_a_rank_that_dies_is_named_and_the_others_are_reported(launch):
    """Catches a report that waits for a dead rank, or that leaves it out without a word."""
    begin = time.monotonic()
    (first, code), (_, other) = launch([], ["die"])
    assert time.monotonic() - begin < 90
    assert (code, other) == (1, 13), first[1]
    assert "Rank 1 gave no recording: its process" in first[0]
    assert "The program ended with" in first[0]
    assert "rank 0" in first[0]
    assert not list(Path("/tmp").glob("torchweave-*127-0-0-1*"))


def test_no_rank_without_a_launcher():
    assert job_of({}) is None
    assert job_of({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert job_of({"RANK": "x", "WORLD_SIZE": "2"}) is None
    assert job_of({"RANK": "3", "WORLD_SIZE": "2"}) is None


def test_without_a_common_folder_only_this_hosts_ranks_are_expected(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    second_host = job_of(variables(5, 8, LOCAL_RANK="1", LOCAL_WORLD_SIZE="4"))
    assert second_host.expected == (4, 5, 6, 7)
    assert not second_host.is_first
    assert second_host.folder.parent == tmp_path
    assert job_of(variables(0, 8), tmp_path / "all").expected == tuple(range(8))


def test_everything_that_came_is_gathered(tmp_path):
    both = [job(rank, tmp_path / "runs") for rank in (0, 1)]
    for each in both:
        announce(each)
        recording_path(each, each.rank).write_text("a recording")
    assert gather(both[0], limit_s=5) == ({0: tmp_path / "runs/rank0.twr", 1: tmp_path / "runs/rank1.twr"}, {})


def test_a_rank_that_failed_says_why(tmp_path):
    both = [job(rank, tmp_path) for rank in (0, 1)]
    [announce(each) for each in both]
    recording_path(both[0], 0).write_text("a recording")
    fail(both[1], "ValueError: boom")
    assert gather(both[0], limit_s=30)[1] == {1: "ValueError: boom"}


def test_a_rank_that_never_comes_is_waited_for_up_to_the_limit(tmp_path):
    """Catches a hang: the launcher may have started fewer ranks than it said."""
    first = job(0, tmp_path)
    announce(first)
    recording_path(first, 0).write_text("a recording")
    begin = time.monotonic()
    assert gather(first, limit_s=0.5)[1] == {1: "it did not come within 0.5 s"}
    assert time.monotonic() - begin < 20


def test_a_rank_whose_process_is_gone_is_not_waited_for(tmp_path):
    first, second = job(0, tmp_path), job(1, tmp_path)
    announce(first)
    recording_path(first, 0).write_text("a recording")
    process = subprocess.Popen([sys.executable, "-c", ""])
    alive = {"pid": process.pid, "host": socket.gethostname(), "key": second.key}
    (tmp_path / "rank1.alive").write_text(json.dumps(alive))
    # dead, and not taken note of: the system still knows its number
    assert "ended without one" in gather(first, limit_s=60)[1][1]
    process.wait(60)
    assert "ended without one" in gather(first, limit_s=60)[1][1]


def test_what_an_earlier_run_left_is_not_taken_for_this_ones(tmp_path):
    """Catches a report of yesterday's rank 1 beside today's rank 0."""
    for name in ("rank1.twr", "rank1.failed"):
        (tmp_path / name).write_text("old")
    second = job(1, tmp_path)
    announce(second)
    assert not (tmp_path / "rank1.twr").exists()
    assert not (tmp_path / "rank1.failed").exists()


def test_only_our_own_folder_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for folder in (None, tmp_path / "kept"):
        first = job(0, folder)
        announce(first)
        recording_path(first, 0).write_text("a recording")
        clean(first)
        assert first.folder.exists() == (folder is not None)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["rank0.twr"]


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="every rank can write"):
        job(0, tmp_path / "file" / "runs")
