"""Gathers what is known of this machine. torch is asked in a process of its own: a broken one must not end ours."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchweave.doctor.machine import DeviceFacts, Machine, Measured
from torchweave.record.smi import other_processes, query

_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_")
# importing torch on a slow disk takes long; the measurement itself some seconds
PROBE_LIMIT_S, MEASURE_LIMIT_S = 120.0, 90.0


def look(*, measure: bool = True) -> Machine:
    """Return what is known of this machine.

    Args:
        measure: Whether to measure on the device, where there is one.
    """
    probe, error = _ask("probe", PROBE_LIMIT_S)
    measured, why = None, "It was not asked for."
    if measure and probe.get("available"):
        answer, why = _ask("measure", MEASURE_LIMIT_S)
        measured = Measured(**answer) if answer else None
    elif measure:
        why = "There is no device to measure."
    driver = query("gpu", ("driver_version",))
    return Machine(
        environment={name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)},
        python=platform.python_version(),
        system=platform.platform(),
        is_wsl="microsoft" in platform.release().lower(),
        driver=driver[0][0] if driver else str(probe.get("driver", "")),
        torch=str(probe.get("torch", "")),
        cuda=str(probe.get("cuda", "")),
        nccl=str(probe.get("nccl", "")),
        available=probe.get("available"),
        error=error or str(probe.get("error", "")),
        devices=tuple(DeviceFacts(**device) for device in probe.get("devices", ())),
        mps=_mps(os.environ),
        others=tuple(other_processes()) if driver is not None else None,
        interception=probe.get("interception"),
        profiler=tuple(probe.get("profiler", ())),
        measured=measured,
        measure_error=why,
    )


def _ask(module: str, limit_s: float) -> tuple[dict[str, Any], str]:
    """Run a module of ours and read the JSON that it prints last; or say why there is none."""
    words = [sys.executable, "-m", f"torchweave.doctor.{module}"]
    source = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", ""))))
    try:
        answer = subprocess.run(  # noqa: S603
            words,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return {}, f"It did not answer within {limit_s:g} s."
    except OSError as error:
        return {}, f"It could not be started: {error}."
    try:
        found = json.loads(answer.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (answer.stderr.strip().splitlines() or ["no word"])[-1]
        return {}, f"It ended with code {answer.returncode}: {last}"
    if not isinstance(found, dict):
        return {}, "It answered with something else than facts."
    return found, ""


def _mps(environment: Mapping[str, str]) -> bool | None:
    """Return whether the multi-process service runs: its control daemon has a pipe."""
    folder = Path(environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 (CUDA's own default)
    try:
        return (folder / "control").exists()
    except OSError:
        return None
