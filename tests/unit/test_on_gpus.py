"""The command that runs all that takes a GPU: steps share devices, and one that fails or hangs ends alone."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import on_gpus
from on_gpus import Step


@pytest.fixture
def steps(monkeypatch):
    def given(**steps):
        monkeypatch.setattr(on_gpus, "STEPS", steps)

    return given


def script(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    return "{python} " + str(folder / f"{name}.py")


SHOW = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


def test_a_step_that_fails_or_hangs_ends_alone(steps, tmp_path):
    hang = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    steps(
        bad=Step(script(tmp_path, "bad", "print('so far'); raise SystemExit(7)"), limit_s=60),
        hang=Step(script(tmp_path, "hang", hang), limit_s=1.0),
        good=Step(script(tmp_path, "good", SHOW), limit_s=60),
    )
    ended = on_gpus.run(["bad", "hang", "good"], ["0"], tmp_path)
    assert [ended[name]["ended"] for name in ("bad", "hang", "good")] == ["7", "too long", "0"]
    assert (tmp_path / "bad.log").read_text() == "so far\n"
    assert (tmp_path / "good.log").read_text() == "0\n"
    assert json.loads((tmp_path / "steps.json").read_text()) == ended


def test_no_device_is_given_to_two_steps_at_once(steps, tmp_path):
    """Catches a measurement that shares its device: each step holds a file named after its devices while it runs."""
    hold = (
        "import os, time\n"
        "for name in os.environ['CUDA_VISIBLE_DEVICES'].split(','):\n"
        f"    os.close(os.open(r'{tmp_path}/device' + name, os.O_CREAT | os.O_EXCL))\n"
        "time.sleep(0.4)\n"
        "for name in os.environ['CUDA_VISIBLE_DEVICES'].split(','):\n"
        f"    os.remove(r'{tmp_path}/device' + name)\n"
    )
    command = script(tmp_path, "hold", hold)
    steps(a=Step(command), both=Step(command, devices=2), b=Step(command), c=Step(command))
    ended = on_gpus.run(["a", "both", "b", "c"], ["3", "5"], tmp_path)
    assert {how["ended"] for how in ended.values()} == {"0"}
    assert sorted(ended["both"]["on"]) == ["3", "5"]


def test_a_step_for_more_devices_than_there_are_is_named(steps, tmp_path):
    steps(two=Step(script(tmp_path, "two", SHOW), devices=2), one=Step(script(tmp_path, "one", SHOW)))
    ended = on_gpus.run(["two", "one"], ["0"], tmp_path)
    assert ended["two"]["ended"] == "2 devices"
    assert ended["one"]["ended"] == "0"


def test_the_devices_that_may_be_used_are_the_environments(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,4")
    assert on_gpus.devices() == ["2", "4"]


@pytest.mark.parametrize("name", sorted(on_gpus.STEPS))
def test_every_step_names_a_file_that_is_there(name):
    words = on_gpus.STEPS[name].command.split()
    files = [word for word in words if word.endswith(".py") or word.startswith("tests/")]
    assert all((on_gpus.ROOT / word).exists() for word in files if word != "tests/gpu/two")
