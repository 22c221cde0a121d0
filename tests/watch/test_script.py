"""A program that is watched runs as it does under `python`; the command line knows which words are whose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake import FakeDevice

from torchweave.cli import live
from torchweave.cli.main import build_parser, main, parser_of
from torchweave.cli.program import cut
from torchweave.errors import UnreadableInputError
from torchweave.record.phases import LEAST_WARM, MOST_WARM, Phases
from torchweave.record.script import Program, prepare

DRIVER = Path(__file__).parent / "driver.py"
PROBE = """\
import json, sys, pickle
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
def main():
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
        "spec": None if __spec__ is None else __spec__.name, "package": __package__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "pickled": pickle.loads(pickle.dumps(Pair(3))).a,
    }))
if __name__ == "__main__":
    main()
"""


def command(*words, cwd):
    """Run the command line with the made-up device, in a process of its own: torch is imported anew."""
    return subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True, timeout=100, cwd=cwd)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line with the made-up device in this process, which is faster."""
    monkeypatch.setattr(live, "find_device", FakeDevice)

    def run(*words):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "package"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for path in ("probe.py", "package/inner.py", "package/__main__.py"):
        (tmp_path / path).write_text(PROBE)
    return tmp_path


@pytest.mark.parametrize(
    "words", [("probe.py", "--lr", "3"), ("-m", "package.inner", "-v"), ("-m", "package", "x"), ("package", "a")]
)
def test_a_program_finds_everything_as_under_python(program, capfd, words):
    """Catches another `sys.argv`, `sys.path[0]`, `__file__` or `__main__` than the program is used to."""
    plain = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=True)
    is_module = words[0] == "-m"
    name, *args = words[1:] if is_module else words
    old_path, old_words, old_main = list(sys.path), sys.argv, sys.modules["__main__"]
    assert prepare(Program(name, tuple(args), is_module))().code == 0
    expected, found = json.loads(plain.stdout), json.loads(capfd.readouterr().out)
    assert {**found, "path": os.path.realpath(found["path"])} == {
        **expected, "path": os.path.realpath(expected["path"])
    }  # fmt: skip
    assert (sys.path, sys.argv, sys.modules["__main__"]) == (old_path, old_words, old_main)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SystemExit", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a word')", 1),
        ("1 / 0", 1),
        ("import sys; sys.exit(256 + 3)", 3),
        ("import os, atexit; atexit.register(lambda: print('at exit'))", 0),
    ],
)
def test_a_program_ends_as_under_python(tmp_path, monkeypatch, capfd, source, code):
    """Catches an exit code that is lost, and exceptions that are swallowed."""
    path = tmp_path / "ends.py"
    path.write_text(source)
    ending = prepare(Program(str(path)))()
    assert ending.code == code
    err = capfd.readouterr().err
    assert ("ZeroDivisionError" in err) == ("1 / 0" in source)
    assert ("a word" in err) == ("a word" in source)


def test_a_traceback_shows_none_of_our_frames(tmp_path, capfd):
    path = tmp_path / "fails.py"
    path.write_text("def f():\n    raise ValueError('boom')\nf()\n")
    assert "boom" in prepare(Program(str(path)))().error
    err = capfd.readouterr().err
    assert "torchweave" not in err
    assert "line 3, in <module>" in err


def test_the_programs_own_hook_shows_its_exception(tmp_path, monkeypatch):
    path = tmp_path / "fails.py"
    path.write_text("import sys\nseen = []\nsys.excepthook = lambda *error: sys.stderr.write('mine')\n1 / 0")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert prepare(Program(str(path)))().code == 1


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("missing.py", None, "no such file"),
        ("broken.py", "def f(:\n", "line 1"),
        ("null.py", "x = 1\0", "Python"),
        ("latin.py", b"x = '\xe9'\n", "Python"),
    ],
)
def test_what_is_no_program_is_refused_before_anything_runs(tmp_path, name, text, word):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UnreadableInputError, match=word):
        prepare(Program(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["no_such_module", "json.nothing", "math", "tests..x", "email"])
def test_modules_that_cannot_be_run_are_refused(name):
    with pytest.raises(UnreadableInputError, match="python -m"):
        prepare(Program(name, is_module=True))


@pytest.mark.parametrize(
    ("words", "own", "name", "args", "is_module"),
    [
        (["a.py"], (), "a.py", (), False),
        (["a.py", "--json", "b"], (), "a.py", ("--json", "b"), False),
        (["--json", "a.py", "--", "--json"], ("--json",), "a.py", ("--json",), False),
        (["--skip", "3", "--save", "b.py", "a.py", "-x"], ("--skip", "3", "--save", "b.py"), "a.py", ("-x",), False),
        (["--between", "x.py", "y.py", "a.py"], ("--between", "x.py", "y.py"), "a.py", (), False),
        (["--html=x.html", "a.py"], ("--html=x.html",), "a.py", (), False),
        (["--step", "3", "a.py"], ("--step", "3"), "a.py", (), False),
        (["-m", "mod", "--lr", "3"], (), "mod", ("--lr", "3"), True),
        (["--json", "-mmod", "x"], ("--json",), "mod", ("x",), True),
        (["--", "a.py", "--json"], (), "a.py", ("--json",), False),
        (["trace.json", "--json"], ("trace.json", "--json"), "", (), False),
        (["trace.json", "a.py"], ("trace.json", "a.py"), "", (), False),
        (["--window", "1..2", "x.twr"], ("--window", "1..2", "x.twr"), "", (), False),
        (["-m"], ("-m",), "", (), False),
        ([], (), "", (), False),
    ],
)
def test_words_behind_a_program_are_the_programs(words, own, name, args, is_module):
    """Catches an option of the program that is taken for ours, and the other way round."""
    found = cut(parser_of(build_parser(), "why"), words)
    assert (found.own, found.name, found.args, found.is_module) == (own, name, args, is_module)


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [
        (["why"], 2, "a trace or a script"),
        (["why", "-m"], 2, "MODULE"),
        (["why", "--steps", "0", "a.py"], 2, "whole number from 1"),
        (["why", "--skip", "-1", "a.py"], 2, "from 0"),
        (["why", "--skip", "x", "a.py"], 2, "invalid int"),
        (["why", "--steps", "1", "trace.json"], 2, "goes with a script"),
        (["why", "--window", "9", "a.py"], 2, "two times"),
        (["why", "missing.py"], 3, "no such file"),
        (["why", "--save", "none/there.twr", "probe.py"], 2, "can be written"),
        (["why", "--range", "nothing", "work.py"], 2, "range"),
    ],
)
def test_mistakes_on_the_command_line_get_a_clear_error(program, run, words, code, word):
    (program / "work.py").write_text("import torch; torch.ones(2) + 1")
    found, _, err = run(*words)
    assert found == code, err
    assert word in err


WORK = """\
import sys, time, torch
import torchweave as tw
x = torch.ones(64, 64)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 9):
    x @ x
    tw.step()
"""


def test_a_run_reports_saves_and_is_read_again(program, run):
    """Catches a report of the run and one of its file that differ."""
    (program / "work.py").write_text(WORK)
    code, out, err = run("why", "--skip", "3", "--save", "run.twr", "--json", "work.py")
    assert code == 0, err
    found = json.loads(out)
    assert found == json.loads(run("why", "run.twr", "--json")[1])
    assert found["file"] == "run.twr"
    assert found["watched"]["steps"] == 2
    assert any("steps 3 to 4" in text for text in found["remarks"])


def test_json_alone_is_on_standard_output(program):
    """Catches the program's prints, those of its children too, in the middle of the JSON."""
    (program / "noisy.py").write_text(
        "import os, torch\nprint('from python')\nos.system('echo from a child')\ntorch.ones(2) + 1\n"
    )
    found = command("why", "--json", "noisy.py", cwd=program)
    assert json.loads(found.stdout)["file"] == "noisy.py"
    assert "from python" in found.stderr
    assert "from a child" in found.stderr


def test_a_program_that_fails_gives_its_traceback_and_then_the_report(program, run):
    (program / "fails.py").write_text("import torch\ntorch.ones(2) + 1\nraise ValueError('boom')\n")
    code, out, err = run("why", "fails.py")
    assert code == 1
    assert "ValueError: boom" in err
    assert "The program ended with ValueError: boom" in out
    (program / "ends.py").write_text("import sys, torch\ntorch.ones(2) + 1\nsys.exit(9)\n")
    assert run("why", "ends.py")[0] == 9


def test_ctrl_c_gives_the_report_so_far(program):
    """Catches a run of hours that is lost because it was stopped."""
    (program / "long.py").write_text(
        "import time, torch\nfor _ in range(10000):\n    torch.ones(2) + 1\n"
        "    print('working', flush=True)\n    time.sleep(0.05)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(DRIVER), "why", "--skip", "0", "long.py"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=program,
    )  # fmt: skip
    assert process.stdout.readline() == "working\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "interrupted (Ctrl-C)" in out
    assert "Nothing to overlap" in out
    assert "Traceback" not in err


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_children_of_a_watched_program_run_as_ever(program, how):
    """Catches workers of a data loader, forked or spawned, that write a log of their own, or fail."""
    (program / "loads.py").write_text(
        "import torch\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, row): return torch.ones(2) * row\n"
        "if __name__ == '__main__':\n"
        f"    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context={how!r})\n"
        "    print('sum', sum(float(batch.sum()) for batch in loader))\n"
    )
    found = command("why", "loads.py", cwd=program)
    assert "sum 12.0" in found.stdout, found.stderr
    assert found.returncode == 0


def test_a_forked_child_that_runs_to_the_programs_end_leaves_the_report_to_its_parent(program):
    """Catches a second report, and a child that hangs in a profiler whose threads it does not have."""
    (program / "forks.py").write_text(
        "import os, torch\nimport torchweave as tw\nx = torch.ones(2) + 1\npid = os.fork()\n"
        "for _ in range(40):\n    x + 1\n    tw.step()\n"
        "if pid:\n    print('child', os.waitpid(pid, 0)[1], flush=True)\n"
    )
    found = command("why", "forks.py", cwd=program)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("Nothing to overlap") == 1
    assert "child 0" in found.stdout


def test_threads_that_outlive_the_main_one_are_watched_to_their_end(program, run):
    """Catches a report in the middle of the work, and a wait for a pool's idle threads, which never end."""
    (program / "threads.py").write_text(
        "import threading, time, torch\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\npool.submit(torch.ones, 2).result()\n"
        "def work():\n    time.sleep(0.2)\n    torch.ones(2) + 1\n    print('late', flush=True)\n"
        "threading.Thread(target=work).start()\n"
    )
    code, out, err = run("why", "threads.py")
    assert code == 0, err
    assert out.index("late") < out.index("Nothing to overlap")


def test_a_program_may_close_its_output(program, run):
    (program / "closes.py").write_text("import sys, io, torch\ntorch.ones(2) + 1\nsys.stdout = io.StringIO()\n")
    code, out, err = run("why", "closes.py")
    assert code == 0, err
    assert "Nothing to overlap" in out


def test_a_notebook_and_what_is_nested_too_deeply_get_a_clear_error(program, run):
    (program / "book.ipynb").write_text("{}")
    (program / "deep.py").write_text(f"x = {'-' * 100_000}1\n")
    code, _, err = run("why", "book.ipynb")
    assert (code, "torchweave.watch()" in err) == (2, True), err
    code, _, err = run("why", "deep.py")
    assert (code, "too deeply" in err) == (3, True), err


def test_a_program_that_never_reaches_the_device_is_told_so(program, run):
    (program / "idle.py").write_text("print('hello')\n")
    code, _, err = run("why", "idle.py")
    assert code == 3
    assert "device work" in err


def test_without_a_device_nothing_runs_and_the_source_is_asked(program, monkeypatch, capsys):
    """Catches a program that runs for hours and then says that there was nothing to measure."""
    (program / "runs.py").write_text("print('it ran')\n")
    monkeypatch.setattr(live, "find_device", lambda: None)
    assert main(["why", "runs.py"]) in (0, 1)
    out, err = capsys.readouterr()
    assert "it ran" not in out
    assert "no CUDA device" in err
    assert main(["why", "missing.py"]) == 3


def test_without_a_device_the_findings_of_the_source_decide(program, monkeypatch, capsys):
    """Catches findings that are lost, and an exit code that says all is well."""
    monkeypatch.setattr(live, "find_device", lambda: None)
    wrong = "import torch\nside = torch.cuda.Stream()\nwith torch.cuda.stream(side):\n"
    wrong += "    side.wait_stream(torch.cuda.current_stream())\n"
    for text, code in ((wrong, 1), ("import torch\n", 0)):
        (program / "runs.py").write_text(text)
        assert main(["why", "runs.py"]) == code
        assert ("missing_wait" in capsys.readouterr().out) == bool(code)
        assert main(["why", "--json", "runs.py"]) == code
        assert len(json.loads(capsys.readouterr().out)["findings"]) == code


def phases_of(times, **options):
    """Return the phase of each step, given how long each takes."""
    phases = Phases(**options)
    found = [phases.phase]
    for ms in times:
        found.append(phases.step(ms))
    return found


def test_warm_up_ends_when_two_steps_take_equally_long():
    """Catches first steps, which load and allocate, in the report."""
    found = phases_of([900, 100, 50, 10, 10.5, 10, 10, 10, 10, 10, 10, 10], steps=2)
    assert found == ["start"] * 5 + ["before"] * 2 + ["watched"] * 2 + ["after"] * 2 + ["flow"] + ["over"]


def test_warm_up_ends_in_the_end():
    found = phases_of([2.0**row for row in range(40)], steps=1)
    assert found.index("before") == MOST_WARM
    assert phases_of([5] * 9, steps=1).index("before") == LEAST_WARM


@pytest.mark.parametrize("skip", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_steps_that_were_asked_for_are_watched(skip, steps):
    """Catches a report of other steps than the user chose."""
    found = phases_of([1] * 40, skip=skip, steps=steps)
    watched = [row for row, phase in enumerate(found) if phase == "watched"]
    assert watched == list(range(skip, skip + steps))
    assert found.count("after") == steps
    assert found.count("before") == (steps if skip > steps else 0)
