"""Steps recorded as traces, read as `torchweave why --pipeline` reads them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measuring.steps import gathered, wait
from torchweave.schedule.simulate import Simulation

_ACTION = re.compile(r"PP:(\d+[FBIW]\d+|\(.*\)OVERLAP_F_B)")


def record(call: Callable[[], Any], path: Path, device: torch.device) -> None:
    """Write a trace of a call, gzip, with the operators of both strands' threads."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config) as profile:
        call()
        wait(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix("")
    profile.export_chrome_trace(str(plain))
    trace = json.loads(plain.read_text())
    trace.pop("traceName", None)  # a path of this machine
    _write(trace, path)
    plain.unlink()


def record_on_all(call: Callable[[], Any], folder: Path, name: str, device: torch.device) -> list[Path]:
    """Write a trace of each rank's part of a call; return all of their paths, once all are written."""
    path = folder / f"{name}_rank{dist.get_rank()}.json.gz"

    def together() -> None:
        dist.barrier()
        wait(device)
        call()

    record(together, path, device)
    return [Path(found) for found in gathered(str(path))]


def step_of(traces: Sequence[Path]) -> Simulation:
    """Return the step that the ranks' traces hold, as `torchweave why --pipeline` sees it."""
    # late: to record a trace needs nothing of what reads one
    from torchweave.cli.pipeline_picture import measured_step
    from torchweave.trace.read import read

    return measured_step([read(trace, host_only=True) for trace in traces])


def keep_small(trace: Path, target: Path, most_bytes: int) -> str:
    """Write a trace with as much of it as fits into so many bytes; return what was left out."""
    whole = json.loads(gzip.decompress(trace.read_bytes()))
    events = whole["traceEvents"]
    steps = (
        ("nothing", lambda _: True),
        ("operators of the host", lambda event: event.get("cat") != "cpu_op"),
        ("all but device work and actions", _is_device_work_or_action),
    )
    left_out = ""
    for left_out, keeps in steps:
        _write({**whole, "traceEvents": [event for event in events if keeps(event)]}, target)
        if target.stat().st_size <= most_bytes:
            return left_out
    target.unlink()
    return f"everything: {left_out} would still be more than {most_bytes} bytes"


def _is_device_work_or_action(event: dict[str, Any]) -> bool:
    if event.get("cat") == "user_annotation":
        return bool(_ACTION.fullmatch(event.get("name", "")))
    return event.get("ph") == "M" or event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def _write(trace: dict[str, Any], path: Path) -> None:
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)
