"""What torch tells about the device: events recorded and awaited, synchronizations, memory; and Python's collector.

Source: `torch/cuda/_gpu_trace.py`; the callbacks are off until somebody asks for them, once for a process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import _gpu_trace

from torchweave.record.writer import Writer, now
from torchweave.trace.log import (
    ALLOCATE,
    EVENT_GONE,
    FREE,
    RECORD,
    SYNC_DEVICE,
    SYNC_EVENT,
    SYNC_STREAM,
    WAIT,
)


class Callbacks:
    """The callbacks of one watched run.

    Args:
        writer: Where to write.
        pool: Returns the stream whose memory pool allocations come from now.
    """

    def __init__(self, writer: Writer, pool: Callable[[], int]) -> None:
        self._writer, self._pool = writer, pool
        self._begun = 0
        self._mine: tuple[tuple[Any, Callable[..., None]], ...] = (
            (_gpu_trace.EventRecordCallbacks, self._two(RECORD)),
            (_gpu_trace.EventWaitCallbacks, self._two(WAIT)),
            (_gpu_trace.EventDeletionCallbacks, self._one(EVENT_GONE)),
            (_gpu_trace.MemoryAllocationCallbacks, self._allocated),
            (_gpu_trace.MemoryDeallocationCallbacks, self._one(FREE)),
            (_gpu_trace.DeviceSynchronizationCallbacks, self._one(SYNC_DEVICE)),
            (_gpu_trace.StreamSynchronizationCallbacks, self._one(SYNC_STREAM)),
            (_gpu_trace.EventSynchronizationCallbacks, self._one(SYNC_EVENT)),
        )

    def begin(self) -> None:
        """Ask for the callbacks."""
        if torch.cuda.is_available():
            torch._C._activate_gpu_trace()
        for registry, callback in self._mine:
            registry.add_callback(callback)
        gc.callbacks.append(self._collected)

    def end(self) -> None:
        """Take them back; torch cannot stop asking, but nothing of ours is called any more."""
        for registry, callback in self._mine:
            registry.callback_list.remove(callback)
        gc.callbacks.remove(self._collected)

    def _one(self, kind: int) -> Callable[..., None]:
        writer = self._writer

        def write(a: int = 0) -> None:
            if writer.on:
                writer.event(kind, writer.place_or_backward(sys._getframe(1)), a)

        return write

    def _two(self, kind: int) -> Callable[..., None]:
        writer = self._writer

        def write(a: int, b: int) -> None:
            if writer.on:
                writer.event(kind, writer.place_or_backward(sys._getframe(1)), a, b)

        return write

    def _allocated(self, address: int) -> None:
        # which stream's pool matters, the line does not: the operator around it has one
        if self._writer.on:
            self._writer.event(ALLOCATE, -1, address, self._pool())

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = now()
        elif self._writer.on and self._begun:
            row = (self._begun, now(), self._writer.thread(), info.get("generation", -1))
            self._writer.tables.collections.extend(row)
