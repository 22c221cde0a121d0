"""A device made up for tests: torch's own profiler and the host's real clock, with kernels invented for CPU operators.

Each outermost operator (and each one of backward) gets a launch call inside it and a kernel after it, on the stream
that the test says is current. So everything that is recorded of the host is real, and nothing that is said of the
device was measured.
"""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import torch

from torchweave.record.device import about_process, leave_anchors, profiler
from torchweave.record.session import Session
from torchweave.record.writer import now

DEVICE = {
    "id": 0, "name": "Made-up GPU", "numSms": 132, "warpSize": 32, "maxThreadsPerMultiprocessor": 2048,
    "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 233472,
}  # fmt: skip


class FakeTrace:
    def __init__(self, profile, where, kernel_us):
        self.profile, self.anchors, self.streams, self.kernel_us = profile, where, [], kernel_us

    def export(self, path: Path) -> None:
        plain = path.with_suffix(".plain.json")
        self.profile.export_chrome_trace(str(plain))
        document = json.loads(plain.read_text())
        plain.unlink()
        document["deviceProperties"] = [DEVICE]
        document["traceEvents"] += self.kernels(document)
        with gzip.open(path, "wt") as file:
            json.dump(document, file)

    def kernels(self, document):
        """Return launch calls and kernels for the outermost operators, in the order of their begins."""
        base = int(document.get("baseTimeNanoseconds", 0))
        ops = [e for e in document["traceEvents"] if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")]
        ops.sort(key=lambda e: (e["tid"], e["ts"], -e["dur"]))
        rows, reach, thread = [], 0.0, None
        for op in ops:
            if op["tid"] != thread:
                thread, reach = op["tid"], 0.0
            if op["ts"] >= reach:
                rows.append(op)
                reach = op["ts"] + op["dur"]
        free, number, made = {}, 900_000, []
        for op in sorted(rows, key=lambda e: e["ts"]):
            number += 1
            stream = self.stream_at(base + round(op["ts"] * 1e3))
            middle = op["ts"] + op["dur"] / 2
            begin = max(op["ts"] + op["dur"], free.get(stream, 0.0)) + 2.0
            free[stream] = begin + self.kernel_us
            made += [
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": op["pid"], "tid": op["tid"],
                 "ts": middle, "dur": min(1.0, op["dur"] / 4), "args": {"correlation": number}},
                {"ph": "X", "cat": "kernel", "name": f"fake_{op['name'][6:]}", "pid": 0, "tid": stream,
                 "ts": begin, "dur": self.kernel_us,
                 "args": {"device": 0, "stream": stream, "correlation": number, "grid": [16, 1, 1],
                          "block": [256, 1, 1], "registers per thread": 32, "shared memory": 0}},
            ]  # fmt: skip
        return made

    def stream_at(self, at_ns):
        current = 7
        for when, stream in self.streams:
            if when > at_ns:
                break
            current = stream
        return current


class FakeDevice:
    """CPU tensors count as the device's; `use(stream)` makes a stream current, for all threads."""

    def __init__(self, kernel_us: float = 200.0) -> None:
        self.kernel_us, self.changes, self.number = kernel_us, [], 7
        self.synchronized = 0
        self.profile = None
        self.owner = threading.get_ident()

    def use(self, stream: int) -> None:
        self.number = stream
        self.changes.append((now(), stream))

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def current_stream(self, ordinal: int) -> int:
        return 0x1000 + self.number

    def current_streams(self) -> list[int]:
        return [self.current_stream(0)]

    def synchronize(self) -> None:
        self.synchronized += 1

    def begin_trace(self) -> None:
        self.profile = profiler()
        self.profile.start()
        self.anchors = leave_anchors()

    def end_trace(self) -> FakeTrace:
        self.profile.stop()
        trace = FakeTrace(self.profile, self.anchors, self.kernel_us)
        trace.streams = list(self.changes)
        self.profile = None
        return trace

    def counters(self) -> dict[str, int]:
        return {}

    def about(self) -> dict[str, str]:
        return about_process()

    def others(self) -> list[str]:
        return []


def watched(block, device=None, **options):
    """Return the log of a block."""
    session = Session(device or FakeDevice(), **options)
    session.begin()
    try:
        block()
    finally:
        recording = session.end()
    return recording.log
