"""The trace for Perfetto: valid JSON, slices that nest, the trace's own events kept, everything on one clock."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import diagnosis
from test_cli import trace

from torchweave.cli.main import main
from torchweave.diagnose.model import Lane
from torchweave.diagnose.verdicts import diagnose
from torchweave.errors import UsageError
from torchweave.reporting.perfetto import write_perfetto
from torchweave.reporting.tracks import both_sides
from torchweave.trace.pieces import PIECE_BYTES
from torchweave.trace.read import read

EVENT = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5.5, "dur": 2, "args": {"stream": 7}}


def load(path: Path):
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def tracks(events):
    """Return slices by the name of their track, sorted by begin."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X" and event.get("cat") == "torchweave":
            found[names[event["pid"], event["tid"]]].append(event)
    return {name: sorted(slices, key=lambda event: event["ts"]) for name, slices in found.items()}


def intervals(slices):
    """Return slices in ns as Perfetto reads them: both numbers as doubles, rounded."""
    rows = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in slices]
    return np.array([(begin, begin + length) for begin, length in rows], dtype=np.int64).reshape(-1, 2)


def write_source(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_source_the_lanes_are_written(tmp_path):
    found = diagnosis(origin_ns=1_790_857_026_000_000_123)
    write_perfetto(found, None, tmp_path / "out.json")
    document = load(tmp_path / "out.json")
    assert document["baseTimeNanoseconds"] == found.origin_ns
    slices = tracks(document["traceEvents"])
    for lane in found.lanes:
        mine = slices[f"stream {lane.stream}"]
        assert np.array_equal(intervals(mine), np.column_stack((lane.begin, lane.end)))
        assert [event["name"] for event in mine] == [found.names[code] for code in lane.name]
    assert slices["stream 7"][0]["args"]["side"] == "forward"


def test_each_cause_and_both_sides_have_a_track(tmp_path):
    found = diagnosis()
    write_perfetto(found, None, tmp_path / "out.json.gz")
    slices = tracks(load(tmp_path / "out.json.gz")["traceEvents"])
    assert np.array_equal(intervals(slices["both sides run"]), both_sides(found))
    (verdict,) = slices["verdict"]
    assert verdict["name"] == found.sentence
    assert verdict["args"]["lost_ms"] == found.numbers.lost_ms
    for number, cause in enumerate(found.causes, 1):
        mine = slices[f"cause {number}: {cause.cause} ({cause.cost_ms:.3f} ms)"]
        both = np.concatenate((cause.lost_intervals, cause.idle_intervals))
        assert np.array_equal(intervals(mine), both[np.argsort(both[:, 0])])
        assert {event["name"].removeprefix(cause.cause) for event in mine} == {": lost overlap", ": idle"}
        assert all(event["args"]["evidence"] == cause.evidence for event in mine)
        assert all(event["args"]["mend"] == cause.mend for event in mine)
    assert "train.py:41" in mine_of(slices, "host_sync")[0]["args"]["where"]


def mine_of(slices, cause):
    return next(found for name, found in slices.items() if cause in name)


def test_evidence_lies_on_the_longest_of_many_slices(tmp_path):
    write_perfetto(diagnosis(num_ops=30_000), None, tmp_path / "out.json")
    mine = mine_of(tracks(load(tmp_path / "out.json")["traceEvents"]), "host_sync")
    full = [event["dur"] for event in mine if "mend" in event["args"]]
    rest = [event["dur"] for event in mine if "mend" not in event["args"]]
    assert len(full) >= 2000
    assert rest
    assert min(full) >= max(rest)


def test_slices_of_one_track_never_overlap(tmp_path):
    begin, end = np.array([0, 10, 20, 25, 60]), np.array([50, 15, 30, 70, 65])
    lane = Lane(0, 7, begin, end, np.zeros(5, dtype=np.int64), np.ones(5, dtype=np.int8))
    write_perfetto(replace(diagnosis(), lanes=(lane,), causes=()), None, tmp_path / "out.json")
    slices = tracks(load(tmp_path / "out.json")["traceEvents"])
    rows = [intervals(mine) for name, mine in slices.items() if name.startswith("stream 7")]
    assert len(rows) == 3
    assert sum(map(len, rows)) == 5
    assert all((times[1:, 0] >= times[:-1, 1]).all() for times in rows)


def test_touching_slices_touch_on_a_clock_that_counts_from_1970(tmp_path):
    source = write_source(tmp_path / "in.json", json.dumps([EVENT]))
    found = diagnosis()
    borders = np.cumsum(np.random.default_rng(5).integers(500, 900, 1000))
    times = np.column_stack((borders[:-1], borders[1:]))
    cause = replace(found.causes[0], lost_intervals=times[::2], idle_intervals=times[1::2])
    write_perfetto(replace(found, causes=(cause,), origin_ns=1_740_461_679_470_692_123), source, tmp_path / "out.json")
    read_back = intervals(mine_of(tracks(load(tmp_path / "out.json")), "host_sync"))
    assert len(read_back) == len(times)
    assert np.array_equal(read_back[1:, 0], read_back[:-1, 1])


def test_hostile_names_stay_text(tmp_path):
    names = ('"}]}, {"ph": "X"', "\\", "\ud800", "\0\u2028")
    found = replace(diagnosis(names=names), sentence=names[0])
    write_perfetto(found, None, tmp_path / "out.json")
    slices = tracks(load(tmp_path / "out.json")["traceEvents"])
    assert {event["name"] for event in slices["stream 7"]} == set(names)
    assert slices["verdict"][0]["name"] == names[0]


@pytest.mark.parametrize("name", ["causes/item_each_step.full", "causes/same_direction_copies.full"])
def test_a_kineto_trace_keeps_its_events_on_one_clock(tmp_path, name):
    source = Path(trace(name))
    found = diagnose(read(source))
    write_perfetto(found, source, tmp_path / "out.json")
    before, after = load(source), load(tmp_path / "out.json")
    ours = len(after["traceEvents"]) - len(before["traceEvents"])
    assert after["traceEvents"][ours:] == before["traceEvents"]
    assert {key: value for key, value in after.items() if key != "traceEvents"} == {
        key: value for key, value in before.items() if key != "traceEvents"
    }
    work = [e for e in before["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    slices = tracks(after["traceEvents"])
    # Perfetto drops a slice that overlaps another of its track
    assert all((times[1:, 0] >= times[:-1, 1]).all() for times in map(intervals, slices.values()))
    (verdict,) = slices["verdict"]
    assert verdict["ts"] == pytest.approx(min(e["ts"] for e in work), abs=0.002)
    assert verdict["ts"] + verdict["dur"] == pytest.approx(max(e["ts"] + e["dur"] for e in work), abs=0.002)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"traceEvents": [EVENT, EVENT], "baseTimeNanoseconds": 1000}),
        json.dumps({"baseTimeNanoseconds": "1000", "traceEvents": [EVENT, EVENT]}, indent=2),
        json.dumps({"note": 'no "traceEvents": [ here', "traceEvents": [EVENT], "baseTimeNanoseconds": 1000}),
        '\ufeff{"baseTimeNanoseconds": 1000, "traceEvents": []}',
        '{"baseTimeNanoseconds": 1000, "traceEvents": [' + json.dumps(EVENT) + ', {"ph": "X", "name": "cut he',
        '{"baseTimeNanoseconds": 1000, "traceEvents": [' + ", ".join([json.dumps(EVENT)] * 3),
        '{"baseTimeNanoseconds": 1000, "traceEvents": [{"ph": "X", "name": "cut he',
    ],
    ids=["tail", "head", "text", "empty", "cut inside", "cut between", "cut at once"],
)
def test_any_source_gives_valid_json(tmp_path, text):
    source = write_source(tmp_path / "in.json", text)
    found = diagnosis(origin_ns=6500)
    write_perfetto(found, source, tmp_path / "out.json")
    events = load(tmp_path / "out.json")["traceEvents"]
    theirs = [event for event in events if event.get("cat") == "kernel"]
    assert len(theirs) == text.count('"kernel"')
    assert tracks(events)["verdict"][0]["ts"] == 5.5


@pytest.mark.parametrize("end", ["]", ""])
def test_a_bare_list_stays_one(tmp_path, end):
    source = write_source(tmp_path / "in.json", json.dumps([EVENT] * 3)[:-1] + end)
    write_perfetto(diagnosis(), source, tmp_path / "out.json")
    assert load(tmp_path / "out.json")[-3:] == [EVENT] * 3


def test_a_gzip_trace_that_was_cut_is_closed(tmp_path):
    source = tmp_path / "in.json.gz"
    source.write_bytes(Path(trace("causes/same_direction_copies.full")).read_bytes()[:-2000])
    write_perfetto(diagnose(read(source)), source, tmp_path / "out.json")
    assert len(load(tmp_path / "out.json")["traceEvents"]) > 100


def test_a_source_of_another_format_gives_the_lanes(tmp_path):
    source = tmp_path / "in.sqlite"
    source.write_bytes(b"SQLite format 3\0" + bytes(100))
    write_perfetto(diagnosis(), source, tmp_path / "out.json")
    assert tracks(load(tmp_path / "out.json")["traceEvents"])["stream 7"]


def test_the_trace_is_not_overwritten(tmp_path):
    source = write_source(tmp_path / "in.json", json.dumps({"traceEvents": [EVENT]}))
    with pytest.raises(UsageError, match="must not replace"):
        write_perfetto(diagnosis(), source, tmp_path / "." / "in.json")
    assert load(source)["traceEvents"] == [EVENT]


def test_the_command_writes_one_trace(tmp_path, capsys):
    name, out = trace("causes/item_each_step.full"), tmp_path / "out.json.gz"
    assert main(["why", name, "--perfetto", str(out)]) == 1
    assert mine_of(tracks(load(out)["traceEvents"]), "host_sync")
    assert main(["why", name, name, "--perfetto", str(out)]) == 2
    assert main(["why", name, "--perfetto", str(tmp_path / "none" / "out.json")]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("cut", [0, 40])
def test_a_source_of_several_pieces_is_joined_again(tmp_path, cut):
    num_events = 170_000
    text = json.dumps({"traceEvents": [EVENT] * num_events})
    assert len(text) > PIECE_BYTES
    source = write_source(tmp_path / "in.json", text[: len(text) - cut])
    write_perfetto(diagnosis(), source, tmp_path / "out.json")
    theirs = [event for event in load(tmp_path / "out.json")["traceEvents"] if event.get("cat") == "kernel"]
    assert len(theirs) == num_events - bool(cut)
