"""The command line: exit codes, JSON keys, options. Catches a change of what is fixed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchweave.cli.main import main
from torchweave.diagnose.causes import NAMES

TRACES = Path(__file__).parents[1] / "traces"
KEYS = {
    "schema", "file", "verdict", "sides", "span_ms", "busy_ms", "overlapped_ms", "possible_ms", "lost_ms", "idle_ms",
    "communication", "streams", "causes", "not_known",
}  # fmt: skip
CAUSE_KEYS = {"cause", "lost_ms", "idle_ms", "recoverable", "certainty", "where", "evidence", "mend"}


def trace(name: str) -> str:
    return str(TRACES / f"{name}.json.gz")


def test_lost_overlap_is_exit_code_1(capsys):
    assert main(["why", trace("causes/item_each_step.full"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= KEYS
    assert found["schema"] == 1
    assert found["causes"][0].keys() >= CAUSE_KEYS
    assert found["causes"][0]["where"].keys() >= {"file", "line", "function", "op", "call"}
    assert all(cause["cause"] in NAMES for cause in found["causes"])
    costs = [cause["lost_ms"] + cause["idle_ms"] for cause in found["causes"]]
    assert costs == sorted(costs, reverse=True)


def test_overlap_is_exit_code_0(capsys):
    assert main(["why", trace("causes/ok_narrow_kernels.full"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "overlapped"
    assert found["causes"] == []
    assert found["communication"] is None


@pytest.mark.parametrize(
    "options",
    [
        ["--window", "5"],
        ["--window", "7..3"],
        ["--window", "nan..3"],
        ["--window", "900000..900001"],
        ["--range", "nothing of this name"],
        ["--between", "forward", "sideways"],
        ["--between", "stream:21", "stream:99999"],
    ],
)
def test_wrong_options_are_exit_code_2(options, capsys):
    assert main(["why", trace("causes/ok_narrow_kernels.full"), *options]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_file_is_exit_code_3(capsys, tmp_path):
    assert main(["why", str(tmp_path / "none.json")]) == 3
    assert "none.json" in capsys.readouterr().err


def test_the_text_report_is_in_order(capsys):
    assert main(["why", trace("causes/wide_wait.full")]) == 1
    text = capsys.readouterr().out
    parts = ["did not overlap", "span 449.353 ms", "stream 117", "Causes, by cost", "a. wide_dependency", "Not known"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    for part in ("Evidence:", "Where:", "Mend:", "wait_stream()", "\x1b"):
        assert (part in text) == (part != "\x1b")


def test_the_sides_can_be_asked_for(capsys):
    main(["why", trace("causes/one_connection.full"), "--json", "--between", "stream:29", "stream:33"])
    assert json.loads(capsys.readouterr().out)["sides"] == ["stream:29", "stream:33"]


def test_a_window_limits_the_numbers(capsys):
    main(["why", trace("causes/wide_wait.full"), "--json", "--window", "0..100"])
    found = json.loads(capsys.readouterr().out)
    assert found["span_ms"] == pytest.approx(100, abs=0.1)
    assert sum(cause["lost_ms"] for cause in found["causes"]) == pytest.approx(found["lost_ms"], rel=0.01)


def test_several_files_are_a_list(capsys):
    files = [trace("causes/full_gemms.full"), trace("causes/ok_two_threads.full")]
    assert main(["why", *files, "--json"]) == 1
    assert [row["verdict"] for row in json.loads(capsys.readouterr().out)] == ["partial", "overlapped"]


def test_one_unreadable_of_several_files_is_exit_code_3_and_the_others_are_shown(capsys, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"traceEvents": [{')
    assert main(["why", trace("causes/ok_two_threads.full"), str(broken), "--json"]) == 3
    out = capsys.readouterr()
    assert len(json.loads(out.out)) == 1
    assert "broken.json" in out.err
