"""Small traces made by hand: a host thread that launches, and a device that runs what it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEVICE = {
    "id": 0, "name": "Test GPU", "numSms": 132, "warpSize": 32, "maxThreadsPerMultiprocessor": 2048,
    "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 233472,
}  # fmt: skip


class Builder:
    """Writes a trace event by event; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.number = 100

    def row(self, category: str, name: str, ts: float, dur: float, tid: Any = 1, pid: Any = 7, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def op(self, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> None:
        self.row("cpu_op", name, ts, dur, tid, **args)

    def call(self, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> int:
        self.number += 1
        self.row("cuda_runtime", name, ts, dur, tid, correlation=self.number, **args)
        return self.number

    def kernel(
        self, stream: int, launch: float, begin: float, dur: float, name: str = "narrow", tid: Any = 1, **args: Any
    ) -> None:
        """A kernel launched by a call of 5 us."""
        number = self.call("cudaLaunchKernel", launch, args.pop("launch_us", 5.0), tid)
        shape = {"grid": [16, 1, 1], "block": [256, 1, 1], "registers per thread": 32, "shared memory": 0}
        self.row(
            "kernel", name, begin, dur, stream, 0, device=0, stream=stream, correlation=number, **{**shape, **args}
        )

    def copy(self, stream: int, launch: float, begin: float, dur: float, name: str, call_us: float = 5.0) -> None:
        number = self.call("cudaMemcpyAsync", launch, call_us)
        self.row("gpu_memcpy", name, begin, dur, stream, 0, device=0, stream=stream, correlation=number, bytes=4096)

    def wait(self, stream: int, ts: float, *, recorded: bool = True, tid: Any = 1, record: int = -1) -> None:
        number = self.call("cudaStreamWaitEvent", ts, 2.0, tid)
        if recorded:
            self.row(
                "cuda_sync", "Stream Wait Event", ts, 1.0, stream, 0, stream=stream, correlation=number,
                wait_on_cuda_event_record_corr_id=record, wait_on_stream=-1,
            )  # fmt: skip

    def trace(self, **head: Any) -> dict[str, Any]:
        return {"schemaVersion": 1, "deviceProperties": [DEVICE], **head, "traceEvents": self.events}

    def write(self, path: Path, **head: Any) -> Path:
        path.write_text(json.dumps(self.trace(**head)))
        return path
