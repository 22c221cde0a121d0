"""The scripts with a known cause say the truth of themselves; they run on a GPU alone, their heads are read here."""

import json
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from watch_scripts import Row, all_scripts, judge, table, watch

from torchweave.cli import live
from torchweave.cli.main import build_parser, main, parser_of
from torchweave.cli.program import cut
from torchweave.diagnose.causes import NAMES
from torchweave.record import writer
from torchweave.record.script import Program, prepare

HERE = Path(__file__).parent
SCRIPTS = Path(__file__).parent.parent / "gpu" / "scripts"
ALL = all_scripts()


def test_there_are_enough_of_them():
    assert len(ALL) >= 27 + 15
    assert sum(bool(script.after) for script in ALL) >= 15
    assert {"missing_wait", "timed_without_sync", "stream_alias"} <= {script.cause for script in ALL}


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)
def test_a_head_is_true(script):
    """Catches a cause that does not exist, a culprit without a mark, an option that `why` does not have."""
    assert {script.cause, *script.accept} <= set(NAMES)
    assert bool(script.lines) == (script.cause != "none")
    prepare(Program(str(SCRIPTS / f"{script.name}.py")))
    parser = parser_of(build_parser(), "why")
    words = cut(parser, [*script.options, "--json", f"{script.name}.py"])
    args = parser.parse_args(words.own)
    assert words.name == f"{script.name}.py"
    if args.range_name is not None:
        assert f'region("{args.range_name}")' in (SCRIPTS / f"{script.name}.py").read_text()
    if args.steps is not None:
        source = (SCRIPTS / f"{script.name}.py").read_text()
        assert "tw.step()" in source
    assert all("=" in pair for pair in script.env)


def report(cause, line, verdict="serial", factor=1.02):
    found = [] if cause is None else [{"cause": cause, "where": {"line": line}}]
    return {"causes": found, "verdict": verdict, "watched": {"factor": factor}}


def test_the_judgement_can_fail():
    """Catches a table in which everything is right whatever was found."""
    script = next(script for script in ALL if script.name == "item_each_step")
    line = script.lines[0]
    assert judge(script, report("host_sync", line), 1.0).right
    assert judge(script, report("explicit_sync", line), 1.0).right
    assert not judge(script, report("host_sync", line + 1), 1.0).right
    assert not judge(script, report("host_busy", line), 1.0).right
    assert not judge(script, report(None, None, "overlapped"), 1.0).right
    harmless = next(script for script in ALL if script.cause == "none")
    assert judge(harmless, report(None, None, "overlapped"), 1.0).right
    assert not judge(harmless, report("host_busy", 3), 1.0).right


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.kill(os.getpid(), 11)", "code -11"),
        ("import time; time.sleep(600)", "did not end"),
        ("print('no report')", "code 0"),
        ("print('{}')", "code 0"),
        ("import sys; sys.exit('torchweave: a mistake')", "a mistake"),
        (f"print({json.dumps(report('host_sync', 3))!r})", ""),
    ],
)
def test_a_script_that_crashes_or_hangs_is_a_row(code, error):
    """Catches one bad script that ends the run of all."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.stdin.readline(); {code}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    row = watch(process, ALL[0], 1.0 if "sleep" in code else 60.0)
    assert error in row.error
    assert bool(row.error) == bool(error)
    assert process.returncode is not None


def test_the_table_names_what_is_wrong_and_what_is_dear():
    rows = [
        Row("a", ("sm_full",), "sm_full", "serial", 3, (3,), 1.02, True, 1.0),
        Row("b", ("gil",), "", "", None, (4,), None, False, 1.0, "code 1: boom"),
        Row("c", ("sm_full",), "sm_full", "serial", 3, (3,), 1.5, True, 1.0),
    ]
    text = table(rows, {"device": "made up"})
    assert "2 of 3" in text
    assert "1 of 2 that are not launch-bound: c" in text
    assert "code 1: boom" in text


# CPU backward runs on the caller's stream, a GPU's on its forward's; and memory of the CPU is not given out by pools
ONLY_ON_A_GPU = {
    "seed_overlapped_forward_backward",
    "forward_after_backward_join",
    "report_backward_then_work",
    "report_freed_early",
}


# each of its own kind; the others are for the long run
A_SAMPLE = {
    "full_gemms",
    "host_busy_starves",
    "item_each_step",
    "ok_two_threads",
    "report_gradient_from_outside",
    "report_mutual_waits",
    "report_perf_counter",
    "report_stream_each_layer",
    "seed_timing",
    "stream_pool_alias",
    "wait_on_itself",
    "wide_wait",
}


def simulated():
    """Return the scripts that can run on made-up streams, most of them marked as long."""
    for each in ALL:
        if each.name not in ONLY_ON_A_GPU:
            yield pytest.param(each, id=each.name, marks=[] if each.name in A_SAMPLE else [pytest.mark.long])


@pytest.mark.parametrize("script", list(simulated()))
def test_races_and_early_clocks_are_where_they_are_marked_and_nowhere_else(script, monkeypatch, tmp_path, capsys):
    """Catches false alarms, which cost no time and so would stand first, and culprits beside the marked line.

    What the device did is made up (fake_cuda.py); what was asked of it, and from which line, is not.
    """
    device = fake_cuda.install(monkeypatch.setattr)
    monkeypatch.setattr(live, "find_device", lambda: device)
    # the made-up streams are no lines of the program
    monkeypatch.setattr(writer, "_library_folders", lambda folders=writer._library_folders: (*folders(), str(HERE)))
    path = fake_cuda.smaller(SCRIPTS / f"{script.name}.py", tmp_path)
    main(["why", *script.options, "--json", str(path)])
    out = capsys.readouterr().out
    found = json.loads(out[out.index('{\n "schema"') :])
    beside = [cause for cause in found["causes"] if cause["cause"] in ("missing_wait", "timed_without_sync")]
    if script.cause not in ("missing_wait", "timed_without_sync"):
        assert beside == []
    else:
        assert [cause["cause"] for cause in beside] == [script.cause]
        assert beside[0]["where"]["line"] in script.lines
    if script.cause == "stream_alias":
        assert (found["causes"][0]["cause"], found["causes"][0]["where"]["line"]) == ("stream_alias", script.lines[0])
    if "--steps" in script.options and not script.factor:
        assert found["watched"]["steps"] == 1
