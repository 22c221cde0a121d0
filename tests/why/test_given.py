"""Whatever is given as a trace, or asked for: an error of ours with a remedy and the right exit code, or a report."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from build import Builder

from torchweave.cli.main import main
from torchweave.errors import UnreadableInputError
from torchweave.trace import pieces
from torchweave.trace.read import read

TRACES = Path(__file__).parents[1] / "traces"
SMALL = TRACES / "causes" / "item_each_step.full.json.gz"


def refused(capsys, code: int, *words: str) -> str:
    assert main(["why", *words]) == code
    text = capsys.readouterr().err
    assert "Remedy:" in text, text
    return text


@pytest.mark.parametrize("word", ["stream:²", "stream:--5", "stream:", "stream:1e3", "stream:" + "9" * 40])
def test_a_stream_that_is_no_number_is_a_usage_error(capsys, word):
    refused(capsys, 2, str(SMALL), "--between", word, "compute")


def test_a_side_without_work_names_the_streams_there_are(capsys):
    text = refused(capsys, 2, str(SMALL), "--between", "stream:125", "stream:999")
    assert "`stream:999` selects no operation" in text
    assert "stream:129" in text.split("Remedy:")[1]


def test_one_side_twice_is_told_as_that(capsys):
    assert "different work" in refused(capsys, 2, str(SMALL), "--between", "compute", "compute")


@pytest.mark.parametrize(("option", "says"), [("10..5", "end after its begin"), ("5000..6000", "within 0..")])
def test_a_window_that_cannot_be(capsys, option, says):
    assert says in refused(capsys, 2, str(SMALL), "--window", option)


def test_a_pipe_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(SMALL.read_bytes()))
    writer.start()
    found = read(pipe)
    writer.join()
    assert found.file == str(pipe)
    assert len(found.work) == len(read(SMALL).work)


def test_an_error_about_a_pipe_names_the_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"no json"))
    writer.start()
    with pytest.raises(UnreadableInputError, match=str(pipe)):
        read(pipe)
    writer.join()


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "a" * 5000])
def test_what_is_no_file_is_refused(capsys, path):
    refused(capsys, 3, path)


def test_a_disk_that_fails_is_an_unreadable_file(monkeypatch, capsys):
    class Failing:
        def read(self, size: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(pieces, "open_trace", lambda path: Failing())
    refused(capsys, 3, str(SMALL))


def test_an_empty_file_and_a_folder_without_traces_have_a_remedy(capsys, tmp_path):
    (tmp_path / "empty.json").touch()
    refused(capsys, 3, str(tmp_path / "empty.json"))
    (tmp_path / "folder").mkdir()
    refused(capsys, 3, str(tmp_path / "folder"))


def test_a_database_that_is_none_is_told_as_that(capsys, tmp_path):
    (tmp_path / "x.sqlite").write_text("hi\n")
    assert "SQLite database" in refused(capsys, 3, str(tmp_path / "x.sqlite"))


def test_a_cut_file_without_device_work_says_that_it_is_cut(capsys, tmp_path):
    build = Builder()
    for number in range(200):
        build.op("aten::mm", 10.0 * number, 5)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(json.dumps(build.trace()).encode())[:-200])
    assert "end" in refused(capsys, 3, str(cut)).split("no GPU work")[1]


def _export(path: Path, text: object) -> Path:
    base = sqlite3.connect(path)
    columns = "start, end, deviceId, streamId, correlationId, demangledName"
    base.execute("CREATE TABLE StringIds (id, value)")
    base.execute("INSERT INTO StringIds VALUES (1, ?)", (text,))
    base.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
    base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 99000, 0, 7, 1, 1)")
    base.commit()
    base.close()
    return path


@pytest.mark.parametrize("text", [b"\xff\x00\xfe", 12, None])
def test_a_name_of_an_export_can_be_anything(capsys, tmp_path, text):
    assert main(["why", str(_export(tmp_path / "x.sqlite", text))]) == 0


def test_an_export_that_ends_early_is_damaged(capsys, tmp_path):
    path = _export(tmp_path / "x.sqlite", "kernel")
    path.write_bytes(path.read_bytes()[:5000])
    assert "ends early" in refused(capsys, 3, str(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(("redirect", "code"), [(">/dev/full", 4), (">&-", 1)])
def test_a_standard_output_that_fails_is_no_traceback(redirect, code):
    command = f"'{sys.executable}' -m torchweave why '{SMALL}' {redirect}"
    found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert found.returncode == code
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("word", "meant"), [("backward_on_forwardstream", "backward_on_forward_stream"), ("host_snyc", "host_sync")]
)
def test_a_misspelt_cause_is_guessed(capsys, word, meant):
    assert main(["explain", word]) == 2
    assert f"did you mean `{meant}`?" in capsys.readouterr().err


def test_a_cause_is_found_however_it_is_written(capsys):
    assert main(["explain", "Host-Sync"]) == 0
    assert capsys.readouterr().out.startswith("host_sync\n")


def test_causes_start_in_one_column_and_times_are_told_in_one_unit(capsys):
    main(["why", str(SMALL)])
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if re.match(r" *[a-z]\. \w+: ", line)]
    assert len(heads) > 1
    assert not any(line.startswith(" ") for line in heads)
    assert not re.search(r"\b\d{3,}(?:\.\d+)? us\b", "\n".join(lines))


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_lines_fit_a_narrow_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["why", str(SMALL)])
    # code of a mend, and words that cannot be parted, are left as they are
    text = capsys.readouterr().out.partition("Causes, by cost")[0].splitlines()[1:]
    assert max(map(len, text)) <= max(columns, 48)


def test_a_lane_of_both_sides_says_so(capsys):
    main(["why", str(TRACES / "causes" / "seed_overlapped_forward_backward.full.json.gz")])
    assert re.search(r"stream \d+ both sides", capsys.readouterr().out)
