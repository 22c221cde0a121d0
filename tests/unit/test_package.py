"""The package's surface: its public names are frozen, and neither importing it nor its help imports torch."""

import json
import subprocess
import sys
from importlib import resources
from importlib.metadata import version

import pytest

import torchweave
from torchweave.cli.main import COMMANDS, EXIT_USAGE

HEAVY = ("torch", "numpy")


def run_python(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)


def modules_after(code):
    """Return which of the heavy packages are imported after some code has run in a fresh interpreter."""
    probe = f"import sys, json\n{code}\nprint()\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    result = run_python("-c", probe)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_probe_itself_sees_an_import():
    assert modules_after("import numpy") == ["numpy"]


@pytest.mark.parametrize(
    "code",
    [
        "import torchweave",
        "import torchweave; torchweave.__version__, torchweave.TorchweaveError, dir(torchweave)",
        "import torchweave; torchweave.timed",
        "import torchweave; torchweave.watch; torchweave.step(); torchweave.region('x').__enter__()",
    ],
)
def test_importing_the_package_imports_neither_torch_nor_numpy(code):
    assert modules_after(code) == []


def test_public_names_are_frozen():
    assert torchweave.__all__ == [
        "TorchweaveError",
        "__version__",
        "choices",
        "communication",
        "pipeline",
        "region",
        "step",
        "timed",
        "watch",
        "weave",
    ]
    assert dir(torchweave) == torchweave.__all__


def test_an_unknown_name_is_a_plain_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'weft'"):
        torchweave.weft  # noqa: B018


def test_typed_marker_is_in_the_package():
    assert resources.files("torchweave").joinpath("py.typed").is_file()


def test_module_and_metadata_agree_on_the_version():
    result = run_python("-m", "torchweave", "--version")
    assert (result.returncode, result.stdout) == (0, f"torchweave {version('torchweave')}\n")
    assert torchweave.__version__ == version("torchweave")


def test_help_lists_every_command_and_imports_no_torch():
    result = run_python("-m", "torchweave", "--help")
    assert result.returncode == 0
    # each command stands in the list with its first line of help, not only in the text above it
    listed = {line.split()[0] for line in result.stdout.splitlines() if line.startswith("    ") and line.split()}
    assert set(COMMANDS) <= listed
    assert "torch" not in modules_after("from torchweave.cli.main import build_parser; build_parser().format_help()")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_without_torch(name):
    code = (
        "from torchweave.cli.main import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit as end: assert not end.code"
    )
    assert "torch" not in modules_after(code)


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["--no-such-option"]])
def test_a_wrong_command_line_leaves_with_the_code_for_usage(words):
    result = run_python("-m", "torchweave", *words)
    assert result.returncode == EXIT_USAGE
    assert "usage:" in result.stderr
    assert result.stdout == ""
