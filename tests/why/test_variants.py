"""Recorded traces as other recorders would have written them: the first cause stays."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from build import Builder

from torchweave.diagnose.verdicts import diagnose
from torchweave.trace.read import read

TRACES = Path(__file__).parents[1] / "traces"
ROCM = {
    "cudaLaunchKernel": "hipLaunchKernel",
    "cudaMemcpyAsync": "hipMemcpyAsync",
    "cuLaunchKernel": "hipLaunchKernel",
}


def without(*categories: str) -> Callable[[dict], dict | None]:
    return lambda event: None if event.get("cat") in categories else event


def no_numbers(event: dict) -> dict:
    """Rows of the device and of calls do not carry the operator's number."""
    args = event.get("args")
    if event.get("cat") == "cpu_op" or not isinstance(args, dict):
        return event
    return {**event, "args": {key: value for key, value in args.items() if key != "External id"}}


def whole_microseconds(event: dict) -> dict:
    """Old recorders cut times to microseconds."""
    if "ts" not in event:
        return event
    begin = math.floor(event["ts"])
    return {**event, "ts": begin, "dur": math.floor(event["ts"] + event.get("dur", 0)) - begin}


def rocm(event: dict) -> dict:
    """Names of HIP calls."""
    name = event.get("name")
    if event.get("cat") not in ("cuda_runtime", "cuda_driver") or not isinstance(name, str):
        return event
    return {**event, "cat": "cuda_runtime", "name": ROCM.get(name, name.replace("cuda", "hip", 1))}


def old_names(event: dict) -> dict:
    """Categories of 2021."""
    old = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset", "cpu_op": "Operator"}
    old |= {"cuda_runtime": "Runtime", "cuda_driver": "Runtime"}
    return {**event, "cat": old.get(event.get("cat"), event.get("cat"))}


def late_host(event: dict) -> dict:
    """The host's clock is 3 us behind the device's."""
    if event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "python_function"):
        return {**event, "ts": event["ts"] + 3}
    return event


VARIANTS = {
    "defaults": without("python_function", "cuda_sync", "overhead"),
    "no event waits": without("cuda_sync"),
    "no overhead rows": without("overhead"),
    "no numbers": no_numbers,
    "whole microseconds": whole_microseconds,
    "HIP names": rocm,
    "categories of 2021": old_names,
    "clocks apart": late_host,
}


def truths() -> list[tuple[str, dict]]:
    folders = ("causes", "ranks")
    rows = [(folder, row) for folder in folders for row in json.loads((TRACES / folder / "truth.json").read_text())]
    # the largest three say nothing that smaller ones do not
    return [
        (f"{folder}/{row['file']}", row) for folder, row in rows if (TRACES / folder / row["file"]).stat().st_size < 2e5
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("file", "truth"), truths(), ids=[file for file, _ in truths()])
def test_the_first_cause_stays(file, truth, variant, tmp_path):
    trace = json.loads(gzip.decompress((TRACES / file).read_bytes()))
    changed = map(VARIANTS[variant], trace["traceEvents"])
    path = tmp_path / "variant.json"
    path.write_text(json.dumps({**trace, "traceEvents": [event for event in changed if event is not None]}))
    causes = [cause.cause for cause in diagnose(read(path)).causes]
    accepted = truth.get("accept") or []
    if truth["cause"] == "none" or not causes:
        assert not causes
        assert truth["cause"] == "none" or "none" in accepted
    else:
        assert causes[0] in (truth["cause"], *accepted)


def test_a_grid_in_threads_is_no_full_chip(tmp_path):
    """Catches a grid of `hipExtModuleLaunchKernel`, which counts threads, read as blocks."""
    build = Builder()
    shape = {"grid": [33_792, 1, 1], "block": [256, 1, 1], "registers per thread": 32}
    at = 100.0
    for turn in range(6):
        build.kernel((13, 17)[turn % 2], 5 * turn, at, 1000, **shape)
        at += 1000
    path = build.write(tmp_path / "blocks.json")
    assert [cause.cause for cause in diagnose(read(path)).causes] == ["sm_full"]
    for event in build.events:
        if event["cat"] == "cuda_runtime":
            event["name"] = "hipExtModuleLaunchKernel"
    found = read(build.write(tmp_path / "threads.json"))
    assert set(found.work.blocks.tolist()) == {132}
    assert "sm_full" not in [cause.cause for cause in diagnose(found).causes]


def test_a_copy_that_its_call_waits_for_blocks_whatever_it_is_called(tmp_path):
    """Catches a recorder that does not name the kind of memory."""
    build = Builder()
    for step in range(6):
        at = 4000.0 * step
        build.kernel((13, 17)[step % 2], at + 5, at + 15, 1900)
        build.copy((13, 17)[step % 2], at + 20, at + 1917, 500, "CopyDeviceToHost", call_us=2400)
    found = diagnose(read(build.write(tmp_path / "x.json")))
    assert found.causes[0].cause == "blocking_copy"
