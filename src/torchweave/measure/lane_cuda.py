"""IDEA: a link on a GPU: a kernel on a communication stream of its own that lasts as long as the bytes would take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torchweave.errors import UsageError
from torchweave.measure.c10d import Call, num_bytes, raw_wait, tensors_of, unboxed_work
from torchweave.measure.link_kernel import LONGEST_NS, LinkKernel

# not annotated in torch
_new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
_new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event

SCRATCH_BYTES = 64 << 20
HIGH_PRIORITY = -1


class CudaLane:
    """One first-in-first-out link of one device.

    The link's kernel starts when the collective's input is ready and the link is free. The collective itself runs on
    its backend as usual, and the link's stream waits for it too.

    Args:
        device: The CUDA device.
        ns_per_byte: How long the link takes for a byte.
        kernel: The device's compiled kernel.
    """

    def __init__(self, device: torch.device, ns_per_byte: float, kernel: LinkKernel) -> None:
        self._device, self._ns_per_byte, self._kernel = device, ns_per_byte, kernel
        self.stream = _new_stream(device, priority=HIGH_PRIORITY)
        self._handle = self.stream.cuda_stream
        self._ready = _new_event()
        self._spare: list[torch.cuda.Event] = []
        self._lock = threading.Lock()
        with torch.cuda.stream(self.stream):
            self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)

    def carry(self, call: Call) -> object:
        """Run a call on its backend and return its result with a Work that ends no sooner than the link allows."""
        size = num_bytes(call.args)
        self._occupy(call, size)
        result = call.redispatch()
        real = unboxed_work(result)
        end = self._spare.pop() if self._spare else _new_event()
        with torch.cuda.stream(self.stream):
            if real is not None:
                raw_wait(real)
        end.record(self.stream)
        # tensors live until a wait is queued: after that the waiting stream's own order protects them
        return call.replaced(result, c10d.PythonCallbackWork(_Pending(end, self._spare, self._device, call.args)))

    def close(self) -> None:
        """Let what is under way end before the scratch buffer goes."""
        self.stream.synchronize()

    def _occupy(self, call: Call, size: int) -> None:
        """Queue the link's kernel behind the current stream's work so far."""
        duration_ns = round(size * self._ns_per_byte)
        if duration_ns > LONGEST_NS:
            raise UsageError(
                f"A simulated link holds a GPU for at most {LONGEST_NS / 1e9:g} s a collective",
                given=f"{size} bytes in {call.operation.name}: {duration_ns / 1e9:.1f} s",
                remedy="take a faster link (--link-gbps) or fewer tokens",
            )
        source = max(tensors_of(call.args[:2]), key=torch.Tensor.numel)
        with self._lock, torch.cuda.device(self._device):
            self._ready.record(torch.cuda.current_stream(self._device))
            self.stream.wait_event(self._ready)
            self._kernel.launch(source, self._scratch, size, duration_ns, self._handle)


class _Pending:
    """A collective under way: the callback of its Work's `wait`, which holds no host."""

    __slots__ = ("_device", "_end", "_held", "_spare")

    def __init__(self, end: torch.cuda.Event, spare: list[torch.cuda.Event], device: torch.device, held: Any) -> None:
        self._end, self._spare, self._device, self._held = end, spare, device, held

    def __call__(self, _: timedelta) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._end)
        self._held = None
        return True

    def __del__(self) -> None:
        # a wait that was queued keeps what it waits for, so the event may be recorded again
        self._spare.append(self._end)
