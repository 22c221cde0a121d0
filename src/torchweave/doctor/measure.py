"""Measures on the device what can run at once, in a process of its own, and prints it as one line of JSON.

Everything is measured by events, as a ratio: both at once over one after the other, medians of rounds that alternate.
Source of the shapes: a scan along 16 rows takes one block a row and leaves the rest of the chip free.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

LIMIT_S = 10.0
_ROUNDS, _LAUNCHES, _WARM = 7, 500, 2
_ROWS, _COLUMNS = 16, 1_500_000
_COPY_ELEMENTS = 16 * 2**20

Work = Callable[[], Any]


def measure() -> dict[str, float | None]:
    """Return what was measured; what did not fit into the time is None."""
    begin = time.perf_counter()
    found: dict[str, float | None] = {}
    steps: tuple[tuple[str, Callable[[], float | None]], ...] = (
        ("launch_us", _launch_us),
        ("kernels", _kernels),
        ("copies", _copies),
        ("both_ways", _both_ways),
        ("collective", _collective),
    )
    for name, step in steps:
        found[name] = step() if time.perf_counter() - begin < LIMIT_S else None
    found["seconds"] = time.perf_counter() - begin
    return found


def at_once(first: Work, second: Work, streams: tuple[Any, Any]) -> float:
    """Return how long two works take at once, over one after the other.

    Args:
        first: Issues work on the current stream.
        second: Likewise.
        streams: The stream of each, when they are to run at once.
    """
    together, apart = [], []
    for row in range(_WARM + _ROUNDS):
        both = _timed(((streams[0], first), (streams[1], second)), streams)
        one = _timed(((streams[0], first), (streams[0], second)), streams)
        if row >= _WARM:
            together.append(both)
            apart.append(one)
    return statistics.median(together) / statistics.median(apart)


def _timed(works: tuple[tuple[Any, Work], ...], streams: tuple[Any, Any]) -> float:
    """Return the device's time from an idle device to the end of what was issued, ms."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    outer = torch.cuda.current_stream()
    begin.record(outer)
    for stream in streams:
        stream.wait_event(begin)
    for stream, work in works:
        with torch.cuda.stream(stream):
            work()
    for stream in streams:
        outer.wait_stream(stream)
    end.record(outer)
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _streams() -> tuple[Any, Any]:
    return torch.cuda.Stream(), torch.cuda.Stream()


def _scan() -> Work:
    rows, result = (torch.ones(_ROWS, _COLUMNS, device="cuda") for _ in range(2))
    return lambda: torch.cumsum(rows, 1, out=result)


def _launch_us() -> float:
    """Return the host's time of one small operator, with a queue that is never full."""
    x = torch.zeros(1, device="cuda")
    times = []
    for _ in range(_WARM + _ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_LAUNCHES):
            x.add_(1)
        times.append((time.perf_counter() - begin) / _LAUNCHES * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times[_WARM:])


def _kernels() -> float:
    return at_once(_scan(), _scan(), _streams())


def _upload() -> Work:
    host, device = torch.ones(_COPY_ELEMENTS, pin_memory=True), torch.empty(_COPY_ELEMENTS, device="cuda")
    return lambda: device.copy_(host, non_blocking=True)


def _download() -> Work:
    host, device = torch.empty(_COPY_ELEMENTS, pin_memory=True), torch.ones(_COPY_ELEMENTS, device="cuda")
    return lambda: host.copy_(device, non_blocking=True)


def _copies() -> float:
    return at_once(_scan(), _upload(), _streams())


def _both_ways() -> float:
    return at_once(_upload(), _download(), _streams())


def _collective() -> float | None:
    """Return how a sum over all devices runs beside a kernel of the first; None with one device."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    parts = [torch.ones(_COPY_ELEMENTS, device=f"cuda:{ordinal}") for ordinal in range(count)]
    beside = [torch.cuda.Stream(device=ordinal) for ordinal in range(1, count)]

    def collective() -> None:
        # the first device's stream is the current one of `at_once`, the others' are their own
        streams = [torch.cuda.current_stream(), *beside]
        torch.cuda.nccl.all_reduce(parts, streams=streams)

    found = at_once(_scan(), collective, _streams())
    for ordinal in range(count):
        torch.cuda.synchronize(ordinal)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
