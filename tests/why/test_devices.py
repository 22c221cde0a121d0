"""Another device that works beside the one that is looked at: it changes no cause."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from build import Builder
from mixing import load

from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.trace.read import read

TRACES = Path(__file__).parents[1] / "traces"


def beside(trace: dict[str, Any], stream: int, *, launched: bool) -> dict[str, Any]:
    """Return a trace with every kernel repeated, shorter, on device 5, launched at the same time by another thread."""
    events = trace["traceEvents"]
    calls = {e["args"].get("correlation"): e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    added = []
    for number, kernel in enumerate([e for e in events if e.get("cat") == "kernel"]):
        other = copy.deepcopy(kernel)
        other |= {"pid": 5, "tid": stream, "dur": kernel["dur"] * 0.2}
        other["args"] |= {"device": 5, "stream": stream, "correlation": 6_000_000 + number}
        other["args"].pop("External id", None)
        for key in ("Collective name", "Process Group Name"):
            other["args"].pop(key, None)
        other["name"] = other["name"].replace("nccl", "some")
        added.append(other)
        if launched:
            call = copy.deepcopy(calls[kernel["args"]["correlation"]])
            call["tid"] = 424242
            call["args"] = {"correlation": 6_000_000 + number}
            added.append(call)
    return {**trace, "traceEvents": events + added}


def first(found: Diagnosis) -> str:
    return found.causes[0].cause


@pytest.mark.parametrize("stream", [7, 21])
@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "legacy_default_stream", "lazy_loading", "first_alloc_on_stream", "pageable_upload", "tiny_kernels",
        "one_connection", "wide_wait",
    ],
)  # fmt: skip
def test_another_device_changes_no_cause(tmp_path, name, launched, stream):
    """Catches rules that take another device's work for what comes next, or for what an operation waited for."""
    trace = load(TRACES / "causes" / f"{name}.full.json.gz")
    alone, both = tmp_path / "alone.json", tmp_path / "both.json"
    alone.write_text(json.dumps(trace))
    both.write_text(json.dumps(beside(trace, stream, launched=launched)))
    one, two = diagnose(read(alone)), diagnose(read(both))
    assert first(one) == first(two)
    assert one.sides.names == two.sides.names
    assert one.numbers.lost_ms == pytest.approx(two.numbers.lost_ms)


@pytest.mark.parametrize("name", ["ddp_one_bucket.plain.rank0", "late_peer.full.rank1"])
def test_computation_on_another_device_is_on_neither_side(tmp_path, name):
    trace = load(TRACES / "ranks" / f"{name}.json.gz")
    path = tmp_path / "both.json"
    path.write_text(json.dumps(beside(trace, 21, launched=False)))
    alone, both = diagnose(read(TRACES / "ranks" / f"{name}.json.gz")), diagnose(read(path))
    assert first(both) == first(alone)
    assert both.numbers.possible_ms == pytest.approx(alone.numbers.possible_ms)
    assert both.communication.hidden_ms == pytest.approx(alone.communication.hidden_ms)
    assert "the sides are those of device" in both.sides.why


def test_streams_of_two_devices_may_be_asked_for(tmp_path):
    build = Builder()
    for turn in range(4):
        build.kernel(13, 10 * turn, 1000 * turn + 100, 900)
        build.kernel(17, 10 * turn + 5, 1000 * turn + 200, 900)
    for event in build.events:
        if event["args"].get("stream") == 17:
            event["args"]["device"] = event["pid"] = 1
    found = diagnose(read(build.write(tmp_path / "x.json")), between=("stream:13", "stream:17"))
    assert found.numbers.possible_ms == pytest.approx(3.6)
