"""What benchmarks that measure row after row share: the result file, a row in words, and traces of single pairs."""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchweave.engine.pair import weave
from torchweave.measure.hidden import Operation, Profile, after_head_start, operations_of, recorded, shares
from torchweave.measure.subject import Subject
from torchweave.measure.training import join, name_of, versions

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_SETTINGS = ("NCCL_", "TORCH_NCCL_", "CUDA_", "CUBLAS_", "TORCHWEAVE_")


def options(what: str | None, num_rows: int, limit_s: float) -> argparse.ArgumentParser:
    """Return the options of a benchmark that measures row after row.

    Args:
        what: The benchmark's docstring.
        num_rows: How many rows it has.
        limit_s: When its last row may begin, seconds.
    """
    parser = argparse.ArgumentParser(description=(what or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rows", type=int, nargs="+", default=range(num_rows), help="numbers of rows, from 0")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=limit_s, help="no row begins later than this")
    return parser


def join_or_be_alone() -> torch.device:
    """Enter torchrun's process group, or one of this rank alone."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return join()


def head(what: str, command: str, device: torch.device) -> dict[str, Any]:
    """Return what a result file begins with."""
    return {
        "what": what,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": name_of(device),
        "versions": versions(device),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all: a run that is cut short keeps what it has."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1))
    part.replace(path)


def told(found: Mapping[str, Any]) -> str:
    """Return a measured row as a line."""
    ways = ", ".join(
        f"{name} {one['woven_ms']:.2f} ms recovered {_share(one['recovered_share'])} "
        f"hidden {_share(one['hidden_share'])} idle {_share(one['idle_share'])} equal {one['bit_equal']}"
        for name, one in found["strategies"].items()
    )
    alone = f"compute {found['compute_ms']:.2f} communication {found['communication_ms']:.2f}"
    limit = f"limit {_share(found['limit_share'])}"
    return f"serial {found['serial_ms']:.2f} {alone} {limit}; {ways}; auto takes {found['auto_takes']}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def record_pair(subject: Subject, strategy: str, path: Path, meet: Callable[[], Any] = lambda: None) -> Profile:
    """Write a trace of one pair, with the operators of both strands' threads, and return its shares."""
    forward, backward = subject.make_pair()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    profile = recorded(lambda: weave(forward, backward, strategy=strategy), meet, operators=True)
    plain = path.with_suffix("")
    profile.export_chrome_trace(str(plain))
    trace = json.loads(plain.read_text())
    plain.unlink()
    trace.pop("traceName", None)  # a path of this machine
    trace["traceEvents"] = list(of_the_pair(trace["traceEvents"]))
    with gzip.open(path, "wt") as target:
        json.dump(trace, target)
    return shares(operations_of(profile))


def of_the_pair(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a trace's events without the device work of the head start, and what ranks meet by before it."""
    work = [event for event in events if event.get("cat") in DEVICE_WORK]
    kept = after_head_start(operation(event) for event in work)
    begin_ns = min((one.begin_ns for one in kept), default=0)
    for event in events:
        if event.get("cat") not in DEVICE_WORK or operation(event).begin_ns >= begin_ns:
            yield event


def operation(event: dict[str, Any]) -> Operation:
    """Return device work of a trace as the benchmark's own profiler hands it over."""
    begin_ns = round(float(event["ts"]) * 1e3)
    return Operation(event["name"], begin_ns, begin_ns + round(float(event["dur"]) * 1e3))


def grids_of(path: Path, kernels: str = "nccl") -> list[int]:
    """Return the numbers of blocks of a trace's kernels whose names begin so; a kernel of NCCL has one a channel."""
    with gzip.open(path, "rt") as source:
        events = json.load(source)["traceEvents"]
    found = {
        event["args"]["grid"][0]
        for event in events
        if event.get("cat") == "kernel" and event["name"].startswith(kernels) and "grid" in event["args"]
    }
    return sorted(found)
