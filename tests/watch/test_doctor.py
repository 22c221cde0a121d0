"""`torchweave doctor`: facts to answers, on machines that are whole, broken, or have nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from torchweave.cli import doctor
from torchweave.cli.main import main
from torchweave.doctor import look as looking
from torchweave.doctor.judge import judge
from torchweave.doctor.machine import DeviceFacts, Machine, Measured

GOOD = Machine(
    python="3.12.1",
    system="Linux",
    driver="580.159",
    torch="2.11.0+cu130",
    cuda="13.0",
    nccl="2.28.9",
    available=True,
    devices=(DeviceFacts("NVIDIA H200", 132, 3, 150 * 2**30),),
    mps=False,
    others=(),
    interception="",
    profiler=("profile_all_threads", "enable_cuda_sync_events"),
    measured=Measured(4.5, 0.51, 0.52, 0.55, 0.6, 8.0),
)


def states(machine):
    return {check.name: check.state for check in judge(machine)}


def check(machine, name):
    return next(each for each in judge(machine) if each.name == name)


def test_a_good_machine_is_good():
    """Catches a false alarm on a machine with nothing wrong."""
    assert set(states(GOOD).values()) == {"ok"}


@pytest.mark.parametrize(
    ("change", "name", "word"),
    [
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, "connections", "one hardware queue"),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "64"}}, "connections", "1 to 32"),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "many"}}, "connections", "1 to 32"),
        ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "launch blocking", "unset"),
        ({"environment": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}, "allocator", "unset"),
        ({"environment": {"TORCH_NCCL_BLOCKING_WAIT": "1"}}, "NCCL settings", "hold the host"),
        (
            {"environment": {"TORCH_NCCL_ENABLE_TIMING": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
            "NCCL settings",
            "breaks all overlap",
        ),
        ({"is_wsl": True}, "system", "batches"),
        ({"torch": "2.4.1"}, "torch", "2.10"),
        ({"available": False, "error": "no driver"}, "CUDA", "no driver"),
        ({"devices": (DeviceFacts("T", 4, 1, 1),)}, "device 0: copy engines", "take turns"),
        ({"devices": (DeviceFacts("T", 4, 0, 1),)}, "device 0: copy engines", "do not run beside"),
        ({"others": ("python (pid 3)",)}, "other processes", "take turns"),
        ({"interception": "Work has no wait."}, "interception", "no wait"),
        ({"profiler": ("enable_cuda_sync_events",)}, "recording", "profile_all_threads"),
        ({"measured": Measured(40.0, 0.5, 0.5, 0.5, 0.5)}, "launch cost", "40.0 us"),
        ({"measured": Measured(4.0, 0.99, 0.5, 0.5, 0.5)}, "kernel overlap", "0.99"),
        ({"measured": Measured(4.0, 0.5, 0.5, 0.98, 0.5)}, "copies both ways", "0.98"),
    ],
)
def test_what_is_bad_is_said_with_the_reason(change, name, word):
    machine = replace(GOOD, **change)
    found = check(machine, name)
    assert found.state == "bad"
    assert word in found.why
    others = {other for other, state in states(machine).items() if state == "bad"} - {name}
    assert others <= {"connections"}


@pytest.mark.parametrize(
    "environment",
    [
        {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        {"CUDA_LAUNCH_BLOCKING": "0"},
        {"CUDA_MODULE_LOADING": "EAGER"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"NCCL_DEBUG": "INFO", "TORCH_NCCL_ENABLE_TIMING": "1"},
    ],
)
def test_harmless_settings_are_ok(environment):
    assert "bad" not in states(replace(GOOD, environment=environment)).values()


def test_nothing_known_is_unknown_and_not_bad():
    """Catches a laptop without torch that is told it is broken."""
    found = states(Machine())
    assert "bad" not in found.values()
    assert {found[name] for name in ("driver", "torch", "CUDA", "NCCL", "devices", "interception", "measurement")} == {
        "unknown"
    }


def test_processes_under_mps_are_no_harm():
    assert states(replace(GOOD, others=("python (pid 3)",), mps=True))["other processes"] == "ok"


def test_one_device_has_no_collective_to_measure():
    machine = replace(GOOD, measured=Measured(4.0, 0.5, 0.5, 0.5, None))
    assert check(machine, "collective overlap").state == "unknown"
    assert "two devices" in check(machine, "collective overlap").why


def run(capsys, monkeypatch, machine, *words):
    monkeypatch.setattr(looking, "look", lambda measure=True: machine)
    code = main(["doctor", *words])
    return code, capsys.readouterr().out


def test_the_command_prints_and_leaves_with_its_code(capsys, monkeypatch):
    code, out = run(capsys, monkeypatch, GOOD)
    assert (code, "0 bad, 0 unknown" in out) == (0, True)
    code, out = run(capsys, monkeypatch, replace(GOOD, is_wsl=True))
    assert (code, "1 bad" in out) == (1, True)


def test_the_json_is_fixed(capsys, monkeypatch):
    code, out = run(capsys, monkeypatch, GOOD, "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["state"]) == (0, 1, "ok")
    assert sorted(found) == ["checks", "measured", "schema", "state"]
    assert sorted(found["checks"][0]) == ["name", "state", "value", "why"]
    assert found["measured"] == asdict(GOOD.measured)


def test_lines_fit_a_narrow_terminal():
    lines = doctor.lines(judge(GOOD), 60)
    assert all(len(line.text) <= 110 for line in lines)


@pytest.fixture
def fake_python(monkeypatch, tmp_path):
    """Let the process that asks torch be another program: a broken torch raises, dies or hangs."""

    def use(text, limit=20.0):
        program = tmp_path / "python"
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr(looking, "PROBE_LIMIT_S", limit)
        return looking.look()

    return use


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("import os; os.abort()", "ended with code"),
        ("import sys; sys.exit('libcuda is broken')", "libcuda is broken"),
        ("print('[1, 2]')", "something else"),
        ("print('no json')", "ended with code 0"),
    ],
)
def test_a_torch_that_breaks_leaves_the_rest_known(fake_python, text, word):
    """Catches a doctor that dies of the illness that it was asked about."""
    machine = fake_python(text)
    assert word in machine.error
    assert machine.python
    assert check(machine, "torch").state == "unknown"
    assert "bad" not in states(machine).values()


def test_a_torch_that_hangs_is_not_waited_for(fake_python):
    assert "did not answer within" in fake_python("import time; time.sleep(60)", limit=0.5).error


def test_a_python_without_torch_is_answered(fake_python):
    source = str(Path(looking.__file__).parent.parent.parent)
    text = (
        f"import sys; sys.path.insert(0, {source!r}); sys.modules['torch'] = None\n"
        "import json\nfrom torchweave.doctor.probe import probe\nprint(json.dumps(probe()))"
    )
    machine = fake_python(text)
    assert (machine.torch, machine.available) == ("", None)


def test_this_machine_is_answered(capsys):
    """Catches anything that only the real path meets: torch of this machine, without or with a device."""
    code = main(["doctor", "--json", "--no-measurement"])
    found = json.loads(capsys.readouterr().out)
    by_name = {each["name"]: each for each in found["checks"]}
    assert code in (0, 1)
    assert by_name["torch"]["state"] == "ok", by_name["torch"]
    assert by_name["interception"]["state"] == "ok", by_name["interception"]
    assert by_name["recording"]["state"] == "ok"
