"""The log and its file: what was written is what is read, and what is broken is said in words."""

from __future__ import annotations

import gzip
import json
import shutil
import zipfile

import msgspec
import pytest
from build import Builder

from torchweave.cli.main import main
from torchweave.errors import UnreadableInputError, UsageError
from torchweave.trace.log import SCHEMA, Events, Log, Operators, Spans, decode, encode
from torchweave.trace.read import read
from torchweave.trace.recording import as_trace, is_recording, write_recording

TABLES = [name for name, value in ((f, getattr(Log(), f)) for f in Log.__struct_fields__) if hasattr(value, "is_even")]


def log():
    return Log(
        places=[("train.py", 3, "main")],
        names=["aten::mm"],
        spans=Spans([5], [9], [1], [0], [0]),
        events=Events([0], [9], [1], [0], [0xFFFF_8000_0000], [0]),
        operators=Operators([0], [0]),
        environment={"CUDA_LAUNCH_BLOCKING": "1"},
        notes=["a note"],
    )


@pytest.fixture
def recording(tmp_path):
    builder = Builder()
    builder.kernel(7, 10, 20, 100)
    builder.kernel(21, 30, 40, 100)
    plain = builder.write(tmp_path / "trace.json")
    with plain.open("rb") as file, gzip.open(tmp_path / "trace.json.gz", "wb") as packed:
        shutil.copyfileobj(file, packed)
    write_recording(tmp_path / "run.twr", tmp_path / "trace.json.gz", log())
    return tmp_path / "run.twr"


def test_a_log_survives_its_file():
    """Catches a column that is not written, or read as another."""
    assert decode(encode(log()), "x") == log()


def test_the_form_is_frozen():
    """Catches a change of the form without a new number: old recordings would be read wrongly."""
    assert SCHEMA == 2
    assert sorted(json.loads(encode(Log()))) == sorted(
        ["schema", "places", "names", "spans", "events", "operators", "accesses", "flow", "clocks", "measured",
         "samples", "streams", "uses", "collections", "steps", "anchors", "environment", "allocator", "about", "others",
         "entry_us", "notes", "error"]
    )  # fmt: skip
    assert TABLES == [
        "spans", "events", "operators", "accesses", "clocks", "samples", "streams", "uses", "collections", "steps",
    ]  # fmt: skip


def test_names_that_no_file_can_hold_are_written_all_the_same():
    """Catches a recording that is lost because a path or a variable has half a character in it."""
    odd = Log(places=[("a\udcff.py", 1, "f")], environment={"CUDA_X": "\udcff"}, error="\ud800")
    assert decode(encode(odd), "x").places[0][0] == "a?.py"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda log: log.spans.begin.append(1), "differ in length"),
        (lambda log: log.spans.place.__setitem__(0, 5), "spans.place"),
        (lambda log: log.spans.name.__setitem__(0, -2), "spans.name"),
        (lambda log: log.operators.first.__setitem__(0, 7), "operators.first"),
        (lambda log: log.events.b.__setitem__(0, 3), "events.b"),
    ],
)
def test_a_log_that_does_not_fit_together_is_refused(change, word):
    """Catches an IndexError, or lines of other code, from a file that was cut or edited."""
    broken = log()
    change(broken)
    with pytest.raises(UnreadableInputError, match=word):
        decode(msgspec.json.encode(broken), "run.twr")


def test_a_newer_form_is_refused_with_the_remedy():
    with pytest.raises(UnreadableInputError, match="newer"):
        decode(msgspec.json.encode(Log(schema=SCHEMA + 1)), "run.twr")


def test_a_recording_of_the_first_form_is_read():
    """Catches old recordings that are refused because a column went."""
    old = json.loads(encode(log())) | {"schema": 1}
    old["operators"]["begin"] = [0]
    read_again = decode(json.dumps(old).encode(), "x")
    assert (read_again.operators, read_again.events) == (log().operators, log().events)


def test_unknown_keys_of_a_later_version_are_passed_over():
    later = json.loads(encode(log())) | {"weather": "fine"}
    assert decode(json.dumps(later).encode(), "x") == log()


def test_a_recording_is_read_where_a_trace_is(recording):
    timeline = read(recording)
    assert timeline.file == str(recording)
    assert timeline.log is not None
    assert timeline.metadata["launch_blocking"] == "1"
    assert len(timeline.work) == 2


def test_a_recording_is_read_from_a_folder_and_from_the_command_line(recording, capsys):
    assert main(["why", str(recording), "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["file"] == str(recording)
    for path in recording.parent.glob("trace*"):
        path.unlink()
    assert main(["why", str(recording.parent), "--json"]) in (0, 1)
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_the_trace_inside_is_what_perfetto_gets(recording, tmp_path, capsys):
    out = tmp_path / "tracks.json"
    assert main(["why", str(recording), "--perfetto", str(out)]) in (0, 1)
    assert len(json.loads(out.read_text())["traceEvents"]) > 4
    with as_trace(recording) as trace:
        assert trace.name == "trace.json.gz"


@pytest.mark.parametrize("where", [0.2, 0.5, 0.95])
def test_a_recording_that_was_cut_is_refused_in_words(recording, where, capsys):
    data = recording.read_bytes()
    recording.write_bytes(data[: int(len(data) * where)])
    assert main(["why", str(recording)]) == 3
    assert "torchweave: " in capsys.readouterr().err


def test_a_recording_with_a_broken_log_is_refused(recording, capsys):
    with zipfile.ZipFile(recording) as archive:
        trace = archive.read("trace.json.gz")
    with zipfile.ZipFile(recording, "w") as archive:
        archive.writestr("trace.json.gz", trace)
        archive.writestr("log.json", "{]")
    assert main(["why", str(recording)]) == 3
    assert "log" in capsys.readouterr().err


def test_other_zip_files_are_no_recordings(tmp_path, capsys):
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", "x")
    assert not is_recording(path)
    assert main(["why", str(path)]) == 3
    assert "zip archive" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said(tmp_path, recording):
    with pytest.raises(UsageError, match="can be written"):
        write_recording(tmp_path / "none" / "x.twr", tmp_path / "trace.json.gz", log())
