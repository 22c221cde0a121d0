"""Traces with two causes at once, made of recorded ones: one after the other, on the same two streams."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync")


def load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


def busiest(events: list[dict], count: int = 2) -> list[int]:
    """Return the busiest streams of a trace, in order of their first operation."""
    time: dict[int, float] = {}
    first: dict[int, float] = {}
    for event in events:
        if event.get("cat") in _GPU[:3]:
            stream = event["args"]["stream"]
            time[stream] = time.get(stream, 0.0) + event["dur"]
            first[stream] = min(first.get(stream, event["ts"]), event["ts"])
    return sorted(sorted(time, key=lambda stream: -time[stream])[:count], key=lambda stream: first[stream])


def concatenate(first: dict[str, Any], second: dict[str, Any], gap_us: float = 20.0) -> dict[str, Any]:
    """Return one trace: `second` begins, by its first device work or call, where `first` ends."""
    parts = [first["traceEvents"], second["traceEvents"]]
    streams = [busiest(events) for events in parts]
    ends = max(event["ts"] + event.get("dur", 0) for event in parts[0] if event.get("cat") in (*_GPU, "cuda_runtime"))
    begins = min(event["ts"] for event in parts[1] if event.get("cat") in ("cpu_op", "cuda_runtime"))
    shift = ends + gap_us - begins
    numbers = 1 + max(max(_numbers(event), default=0) for event in parts[0])
    renamed = dict(zip(streams[1], streams[0], strict=True))
    host = {event["pid"] for event in parts[0] if event.get("cat") == "cuda_runtime"}
    threads = [_thread(events) for events in parts]
    moved = [_moved(event, shift, numbers, renamed, host, threads) for event in parts[1] if "ts" in event]
    return {**first, "traceEvents": parts[0] + moved}


def _numbers(event: dict) -> list[int]:
    args = event.get("args") or {}
    return [args[key] for key in ("correlation", "External id") if isinstance(args.get(key), int)]


def _thread(events: list[dict]) -> Any:
    return next(event["tid"] for event in events if event.get("cat") == "cuda_runtime")


def _moved(event: dict, shift: float, numbers: int, streams: dict, host: set, threads: list) -> dict:
    event = {**event, "ts": event["ts"] + shift}
    args = dict(event.get("args") or {})
    for key in ("correlation", "External id"):
        if isinstance(args.get(key), int):
            args[key] += numbers
    if event.get("cat") in _GPU and args.get("stream") in streams:
        args["stream"] = event["tid"] = streams[args["stream"]]
    elif event.get("cat") not in _GPU and event.get("pid") not in (-1, "", "Spans", "Traces"):
        event["pid"] = next(iter(host))
        if event.get("tid") == threads[1]:
            event["tid"] = threads[0]
    return {**event, "args": args}
