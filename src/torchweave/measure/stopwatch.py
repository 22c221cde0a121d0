"""IDEA: the time of one call on all ranks, begun together: the host's on a CPU, the device's on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_CYCLES_PER_MS = 2_000_000  # a GPU's clock is at most about 2 GHz


class Stopwatch:
    """Times calls.

    Args:
        device: Whose time is measured.
        group: The ranks that begin together.
        head_start_ms: How long a GPU is kept busy first, so that the host is ahead as in training.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, head_start_ms: float = 15.0) -> None:
        self._device, self._group = device, group
        self._head_start = int(head_start_ms * _CYCLES_PER_MS)

    def time_ms(self, call: Callable[[], Any]) -> float:
        """Return how long a call takes, ms; what it returns is freed only afterwards."""
        return self._device_ms(call) if self._device.type == "cuda" else self._host_ms(call)

    def _host_ms(self, call: Callable[[], Any]) -> float:
        dist.barrier(self._group)
        begin = time.perf_counter()
        result = call()
        end = time.perf_counter()
        del result
        return (end - begin) * 1e3

    def _device_ms(self, call: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        sleep_on_device(self._head_start)
        begin.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return float(begin.elapsed_time(end))


def sleep_on_device(cycles: int) -> None:
    """Keep the current stream busy, so that what is queued next begins later."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
