"""The device that a program is watched on, as far as recording needs it: everything that touches CUDA is here."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from torchweave.record.smi import other_processes
from torchweave.record.writer import now
from torchweave.trace.lines import ANCHOR

_COUNTERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams")
_ANCHORS = 5
_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "GPU_MAX_HW_QUEUES", "HIP_")


class Trace(Protocol):
    """A profiler's recording.

    Attributes:
        anchors: Before and after each annotation that joins the clocks, ns.
    """

    anchors: list[tuple[int, int]]

    def export(self, path: Path) -> None:
        """Write it as Chrome JSON, gzip."""


class Device(Protocol):
    """What recording needs of a device."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is the device's."""

    def current_stream(self, ordinal: int) -> int:
        """Return the stream that is current for a device."""

    def current_streams(self) -> list[int]:
        """Return the streams that are current on this thread, of all devices."""

    def synchronize(self) -> None:
        """Wait for all work."""

    def begin_trace(self) -> None:
        """Start the profiler."""

    def end_trace(self) -> Trace:
        """Stop the profiler."""

    def counters(self) -> dict[str, int]:
        """Return counters of the allocator."""

    def about(self) -> dict[str, str]:
        """Return versions and names."""

    def others(self) -> list[str]:
        """Return other processes on the device."""


class CudaTrace:
    """A recording of torch's profiler."""

    def __init__(self, profile: Any, anchors: list[tuple[int, int]]) -> None:
        self._profile, self.anchors = profile, anchors

    def export(self, path: Path) -> None:
        """Write it as Chrome JSON, gzip."""
        self._profile.export_chrome_trace(str(path))


class Cuda:
    """CUDA, by torch."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._anchors: list[tuple[int, int]] = []

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is the device's."""
        return tensor.is_cuda

    def current_stream(self, ordinal: int) -> int:
        """Return the CUDA stream that is current for a device."""
        return int(torch._C._cuda_getCurrentRawStream(ordinal))

    def current_streams(self) -> list[int]:
        """Return the streams that are current on this thread, of all devices."""
        if not torch.cuda.is_initialized():
            return []
        return sorted({self.current_stream(ordinal) for ordinal in range(torch.cuda.device_count())})

    def synchronize(self) -> None:
        """Wait for all work of all devices that the program has used."""
        if not torch.cuda.is_initialized():
            return
        current = torch.cuda.current_device()
        for ordinal in range(torch.cuda.device_count()):
            # a context on a device that the program never used would cost it memory there
            if ordinal == current or torch.cuda.memory_stats(ordinal).get("allocated_bytes.all.peak", 0):
                torch.cuda.synchronize(ordinal)

    def begin_trace(self) -> None:
        """Start torch's profiler, without stacks: the log has the lines."""
        self._profile = profiler()
        self._profile.start()
        self._anchors = leave_anchors()

    def end_trace(self) -> CudaTrace:
        """Stop torch's profiler, when all work is done."""
        self.synchronize()
        self._profile.stop()
        profile, self._profile = self._profile, None
        return CudaTrace(profile, self._anchors)

    def counters(self) -> dict[str, int]:
        """Return the counters of the caching allocator that tell of memory pressure."""
        if not torch.cuda.is_initialized():
            return {}
        stats = torch.cuda.memory_stats()
        return {name: int(stats[name]) for name in _COUNTERS if name in stats}

    def about(self) -> dict[str, str]:
        """Return versions and names."""
        found = about_process()
        if torch.cuda.is_initialized():
            found["device"] = torch.cuda.get_device_name()
        return found

    def others(self) -> list[str]:
        """Return other processes on the device, as the driver's tool tells."""
        return other_processes()


def pointer_of(stream: Any) -> int:
    """Return the CUDA stream behind a stream object, also behind one of `torch.Stream`."""
    pointer = getattr(stream, "cuda_stream", None)
    if pointer is None:
        pointer = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        ).cuda_stream
    return int(pointer)


def profiler() -> Any:
    """Return torch's profiler with everything that this torch can record cheaply."""
    from torch.profiler import profile, supported_activities

    config = torch._C._profiler._ExperimentalConfig
    wanted: dict[str, Any] = {"profile_all_threads": True, "enable_cuda_sync_events": True}
    while True:
        try:
            experimental = config(**wanted)
            break
        except TypeError:
            # older versions know the later options only
            wanted.pop(next(iter(wanted)))
    # one cycle is all there is: torch need not warn that the next one clears its events
    return profile(activities=list(supported_activities()), experimental_config=experimental, acc_events=True)


def leave_anchors() -> list[tuple[int, int]]:
    """Leave annotations in the trace, and return when, by the log's clock, ns: several, for the first takes longest."""
    anchors = []
    for _ in range(_ANCHORS):
        begin = now()
        with torch.profiler.record_function(ANCHOR):
            pass
        anchors.append((begin, now()))
    return anchors


def about_process() -> dict[str, str]:
    """Return versions, and what torchrun says of this rank."""
    found = {
        "torchweave": _version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or torch.version.hip),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "command": " ".join(sys.argv),
    }
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        if variable in os.environ:
            found[name] = os.environ[variable]
    return found


def _version() -> str:
    try:
        return version("torchweave")
    except PackageNotFoundError:  # run from its sources, without installing it
        return "sources"


def environment() -> dict[str, str]:
    """Return the variables that decide about overlap."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}
