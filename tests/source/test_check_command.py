"""The command: exit codes, JSON keys, annotations, comments, settings, and files that are not what they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchweave
from torchweave.cli.main import main
from torchweave.source import check_file, check_source
from torchweave.source.settings import settings_for

EXAMPLES = Path(__file__).parents[2] / "examples"
FAULT = 'import os\nos.environ["CUDA_LAUNCH_BLOCKING"] = "1"{}\n'
# a subprocess in another folder gets the sources that this process has
OURS = {**os.environ, "PYTHONPATH": str(Path(torchweave.__file__).parents[1])}
KEYS = ["file", "line", "column", "cause", "why", "mend", "certainty"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLAIN = FAULT.format("")


def write(path, text=PLAIN):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def run(capsys, *words):
    code = main(["check", *words])
    out = capsys.readouterr()
    assert "Traceback" not in out.err
    return code, out.out, out.err


# -- results


def test_nothing_found_is_exit_code_0(folder, capsys):
    write(folder / "a.py", "x = 1\n")
    assert run(capsys, "a.py")[:2] == (0, "Nothing found in 1 file.\n")


def test_a_finding_is_exit_code_1_and_shows_line_code_and_mend(folder, capsys):
    write(folder / "a.py")
    code, out, _ = run(capsys, "a.py")
    assert code == 1
    assert out.startswith('a.py:2:1: launch_blocking\n     os.environ["CUDA_LAUNCH_BLOCKING"] = "1"\n')
    assert "Mend:" in out
    assert out.endswith("1 finding in 1 file.\n")


def test_json_has_exactly_the_keys_that_are_fixed(folder, capsys):
    write(folder / "a.py")
    code, out, _ = run(capsys, "a.py", "--json")
    found = json.loads(out)
    assert code == 1
    assert list(found) == ["schema", "findings"]
    assert found["schema"] == 1
    assert list(found["findings"][0]) == KEYS
    first = found["findings"][0]
    assert (first["file"], first["line"], first["column"], first["certainty"]) == ("a.py", 2, 1, "shown")


def test_json_of_nothing_is_an_empty_list(folder, capsys):
    write(folder / "a.py", "")
    assert json.loads(run(capsys, "a.py", "--json")[1]) == {"schema": 1, "findings": []}


def test_annotations_escape_what_their_format_uses(folder, capsys):
    """An unescaped comma or line break would cut the annotation, or make a command of the rest."""
    write(folder / "a,b:c%.py")
    code, out, _ = run(capsys, "a,b:c%.py", "--format", "github")
    assert code == 1
    assert out.count("\n") == 1
    assert out.startswith(
        "::warning file=a%2Cb%3Ac%25.py,line=2,col=1,title=torchweave%3A launch_blocking::Each launch"
    )
    assert "%0A" in out


def test_columns_count_characters(folder):
    code = 'import os\nx = "ü€"; os.environ["CUDA_LAUNCH_BLOCKING"] = "1"\n'
    assert [one.column for one in check_source(code)] == [11]


def test_the_question_s_scripts(capsys):
    """Their right findings, and no wrong one."""
    found = {
        name: [(one.cause, one.line) for one in check_file(EXAMPLES / name)]
        for name in ("naive_overlap.py", "stream_timing.py", "woven_overlap.py", "moe_chunk.py")
    }

    def line(name, text):
        rows = (EXAMPLES / name).read_text().splitlines()
        return next(number for number, row in enumerate(rows, 1) if text in row)

    assert found == {
        "naive_overlap.py": [("backward_on_forward_stream", line("naive_overlap.py", "loss1.backward()"))],
        "stream_timing.py": [("timed_without_sync", line("stream_timing.py", "(time.time() - start)"))],
        "woven_overlap.py": [],
        "moe_chunk.py": [],
    }


def test_check_imports_neither_torch_nor_numpy(folder):
    write(folder / "a.py")
    probe = (
        "import sys\nfrom torchweave.source import check_file\ncheck_file('a.py')\n"
        "print([m for m in ('torch', 'numpy', 'rich', 'msgspec') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False, env=OURS
    )
    assert result.stdout == "[]\n", result.stderr


def test_causes_and_explain_know_what_check_finds(capsys):
    assert main(["explain", "stream_alias"]) == 0
    assert "torchweave check" in capsys.readouterr().out
    assert main(["explain", "no_such_call"]) == 0
    assert "async_copy_to_device" in capsys.readouterr().out


# -- comments


@pytest.mark.parametrize(
    "comment",
    [
        "# torchweave: ignore",
        "# torchweave: ignore[launch_blocking]",
        "#torchweave:ignore [launch_blocking, host_sync]",
    ],
)
def test_a_comment_takes_a_finding_away(folder, capsys, comment):
    write(folder / "a.py", FAULT.format("  " + comment))
    assert run(capsys, "a.py")[0] == 0


def test_a_comment_counts_for_the_whole_statement(folder, capsys):
    write(folder / "a.py", 'import os\nos.environ.update(\n    CUDA_LAUNCH_BLOCKING="1",  # torchweave: ignore\n)\n')
    assert run(capsys, "a.py") == (0, "Nothing found in 1 file.\n", "")


def test_a_comment_for_another_cause_is_told_and_takes_nothing(folder, capsys):
    write(folder / "a.py", FAULT.format("  # torchweave: ignore[host_sync]"))
    code, out, err = run(capsys, "a.py")
    assert code == 1
    assert "a.py:2: `host_sync` is not found here" in err
    assert "launch_blocking" in out


def test_an_unknown_cause_in_a_comment_is_told(folder, capsys):
    write(folder / "a.py", "x = 1  # torchweave: ignore[hots_sync]\n")
    assert "a.py:1: there is no rule for the cause `hots_sync`" in run(capsys, "a.py")[2]


def test_a_comment_that_takes_nothing_is_told(folder, capsys):
    write(folder / "a.py", "x = 1  # torchweave: ignore\n")
    assert "a.py:1: nothing is found here" in run(capsys, "a.py")[2]


def test_a_string_is_no_comment(folder, capsys):
    write(folder / "a.py", FAULT.format(' or "# torchweave: ignore"'))
    assert run(capsys, "a.py")[2] == ""


# -- settings


def project(folder, table):
    write(folder / "pyproject.toml", f"[tool.torchweave]\n{table}\n")


def test_settings_are_found_upward_and_choose_causes(folder, capsys):
    project(folder, 'ignore = ["launch_blocking"]')
    write(folder / "src" / "deep" / "a.py")
    assert run(capsys, "src")[0] == 0
    project(folder, 'select = ["launch_blocking"]')
    assert run(capsys, "src/deep/a.py")[0] == 1
    project(folder, 'select = ["host_sync"]')
    assert run(capsys, "src/deep/a.py")[0] == 0


def test_a_pyproject_without_our_table_is_passed_by(folder, capsys):
    project(folder, 'ignore = ["launch_blocking"]')
    write(folder / "src" / "pyproject.toml", "[tool.other]\n")
    write(folder / "src" / "a.py")
    assert run(capsys, "src/a.py")[0] == 0


@pytest.mark.parametrize("pattern", ["old", "old/*", "*/b.py", "b.py", "old/b.py"])
def test_excluded_files_are_left_out_of_folders(folder, capsys, pattern):
    project(folder, f'exclude = ["{pattern}"]')
    write(folder / "old" / "b.py")
    write(folder / "a.py", "x = 1\n")
    assert run(capsys, ".")[:2] == (0, "Nothing found in 1 file.\n")
    assert run(capsys, "old/b.py")[0] == 1, "a file that is named is checked"


@pytest.mark.parametrize(
    "table", ['selcet = ["host_sync"]', 'ignore = ["hots_sync"]', 'ignore = "host_sync"', "ignore = [1]", "= nonsense"]
)
def test_wrong_settings_are_exit_code_2_and_say_what_was_meant(folder, capsys, table):
    project(folder, table)
    write(folder / "a.py")
    code, out, err = run(capsys, "a.py")
    assert (code, out) == (2, "")
    assert "pyproject.toml" in err


def test_settings_without_a_file_look_for_all(folder):
    assert len(settings_for(folder).causes) == 13


@pytest.mark.parametrize(
    "words",
    [["--select", "hots_sync"], ["--ignore", "none"], ["--format", "xml"], ["--json", "--format", "github"], []],
)
def test_wrong_options_are_exit_code_2(folder, capsys, words):
    write(folder / "a.py")
    try:
        code = main(["check", *(["a.py", *words] if words else [])])
    except SystemExit as end:
        code = end.code
    assert code == 2


def test_options_choose_causes(folder, capsys):
    write(folder / "a.py")
    assert run(capsys, "a.py", "--ignore", "launch_blocking")[0] == 0
    assert run(capsys, "a.py", "--select", "host_sync")[0] == 0
    assert run(capsys, "a.py", "--select", "launch_blocking")[0] == 1


# -- files that are not what they should be

BROKEN = {
    "python2.py": b'print "hello"\n',
    "nul.py": b"x = 1\x00\n",
    "binary.py": bytes(range(256)),
    "latin.py": "x = 'é'\n".encode("latin-1"),
    "declared.py": b"# -*- coding: no-such-encoding -*-\nx = 1\n",
    "deep.py": b"(" * 5000 + b")" * 5000,
    "deep_names.py": b"x = " + b"-" * 100_000 + b"1\n",
    "utf16.py": "import os\n".encode("utf-16"),
    "broken.ipynb": b'{"cells": [',
    "no.ipynb": b'["a"]',
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unreadable_file_is_told_and_the_others_are_checked(folder, capsys, name):
    (folder / name).write_bytes(BROKEN[name])
    write(folder / "good.py")
    code, out, err = run(capsys, name, "good.py", "missing.py")
    assert code == 3
    assert name in err
    assert "missing.py" in err
    assert "launch_blocking" in out


def test_one_encoding_declared_one_by_its_mark(folder, capsys):
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n" + FAULT.format("").encode())
    (folder / "mark.py").write_bytes(b"\xef\xbb\xbf" + FAULT.format("").encode())
    (folder / "windows.py").write_bytes(FAULT.format("").replace("\n", "\r\n").encode())
    code, out, err = run(capsys, "latin.py", "mark.py", "windows.py", "--json")
    assert (code, err) == (1, "")
    assert [one["line"] for one in json.loads(out)["findings"]] == [4, 2, 2]


NESTED = {
    "sum": "x = " + " + ".join(["torch.ones(9, device='cuda')"] * 900),
    "elif": "if a:\n    pass\n" + "".join(f"elif a == {n}:\n    torch.cuda.synchronize()\n" for n in range(400)),
    "calls": "x = " + "f(" * 80 + ")" * 80,
    "chain": "x = torch.ones(9).cuda()" + ".exp()" * 300,
    "blocks": "".join("    " * n + f"for i{n} in range(9):\n" for n in range(18))
    + "    " * 18
    + "torch.cuda.synchronize()",
    "functions": "".join(f"def f{n}(x):\n    f{n + 1}(x)\n    f{n + 1}(x)\n    f{n + 1}(x)\n" for n in range(60))
    + "f0(torch.cuda.Stream())",
    "recursion": "def f(x):\n    with torch.cuda.stream(x):\n        return g(x)\ndef g(x):\n    return f(x)\nf(1)",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", NESTED)
def test_deep_and_wide_code_is_read_in_time_and_without_an_error(name):
    """A reader that follows calls and loops could take exponential time, or run out of its stack."""
    check_source("import torch\n" + NESTED[name] + "\n")


def test_a_huge_file_is_read(folder):
    code = "import torch\nside = torch.cuda.Stream()\n" + "x = torch.ones(9, device='cuda')\ny = x + 1\n" * 20_000
    assert check_source(code) == ()


def test_folders_are_walked_without_following_links_round(folder, capsys):
    write(folder / "src" / "a.py")
    write(folder / "src" / "__pycache__" / "b.py")
    write(folder / "src" / ".hidden" / "c.py")
    write(folder / "src" / "notes.txt", "x")
    (folder / "src" / "round").symlink_to(folder / "src", target_is_directory=True)
    (folder / "src" / "again.py").symlink_to(folder / "src" / "a.py")
    (folder / "src" / "dangling.py").symlink_to(folder / "nowhere")
    code, out, err = run(capsys, "src", "src/a.py", "--json")
    assert code == 3
    assert err.count("dangling.py") == 1
    assert len(json.loads(out)["findings"]) == 1, "one file, however often it is named"


def test_an_empty_folder_is_told(folder, capsys):
    (folder / "empty").mkdir()
    code, _, err = run(capsys, "empty")
    assert code == 3
    assert "empty" in err


def test_a_notebook_is_read_cell_by_cell(folder, capsys):
    cells = [
        {"cell_type": "markdown", "source": ["# title"]},
        {"cell_type": "code", "source": ["%load_ext autoreload\n", "!nvidia-smi\n", "import os\n"]},
        {"cell_type": "code", "source": "%%bash\nexport X='\n"},
        {"cell_type": "code", "source": ["x = 1\n", 'os.environ["CUDA_LAUNCH_BLOCKING"] = "1"']},
    ]
    write(folder / "n.ipynb", json.dumps({"cells": cells}))
    code, out, err = run(capsys, "n.ipynb")
    assert (code, err) == (1, "")
    assert out.startswith("n.ipynb:cell 4:2:1: launch_blocking")
    annotation = run(capsys, "n.ipynb", "--format", "github")[1]
    assert annotation.startswith("::warning file=n.ipynb,line=1,title=torchweave%3A launch_blocking::Cell 4, line 2: ")


def test_python_from_a_pipe(folder):
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m torchweave check <(printf '%s' \"$CODE\")"],
        capture_output=True, text=True, timeout=60, check=False, env={**OURS, "CODE": PLAIN},
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
