"""IDEA: a link on a GPU: a kernel on a communication stream of its own that lasts as long as the bytes would take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torchweave.engine.later import tensors_of
from torchweave.errors import UsageError
from torchweave.measure.c10d import Call, num_bytes, raw_wait, unboxed_work
from torchweave.measure.link_kernel import LONGEST_NS, VECTOR_BYTES, LinkKernel

# not annotated in torch
_new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
_new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event

SCRATCH_BYTES = 64 << 20
# what these do with one rank is a copy
COPIES_ALONE = frozenset({"alltoall_base_", "_allgather_base_"})
HIGH_PRIORITY = -1


class CudaLane:
    """One first-in-first-out link of one device.

    The link's kernel starts when the collective's input is ready and the link is free. The collective itself runs on
    its backend as usual, and the link's stream waits for it too. In a group of one, what a collective does is a copy of
    its own: there the kernel carries it, because a backend's copy at the memory's full speed, beside a link that is
    slower, would hold all SMs for something that no real link does.

    Args:
        device: The CUDA device.
        ns_per_byte: How long the link takes for a byte.
        kernel: The device's compiled kernel.
        alone: Whether the group is of one rank.
    """

    def __init__(self, device: torch.device, ns_per_byte: float, kernel: LinkKernel, *, alone: bool) -> None:
        self._device, self._ns_per_byte, self._kernel, self._alone = device, ns_per_byte, kernel, alone
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
        duration_ns = self._duration_ns(call, size)
        if self._alone and _is_copy(call, size):
            with self._after_current_stream():
                self._kernel.carry(call.args[1], call.args[0], size, duration_ns, self._handle)
            return call.operation.result(call.args, self._pending(call))
        # what is sent rather than what is received: the backend writes that meanwhile
        source = max(tensors_of(call.args[1::-1]), key=torch.Tensor.numel)
        with self._after_current_stream():
            self._kernel.hold(source, self._scratch, size, duration_ns, self._handle)
        result = call.redispatch()
        real = unboxed_work(result)
        if real is not None:
            with torch.cuda.stream(self.stream):
                raw_wait(real)
        return call.replaced(result, self._pending(call))

    def _pending(self, call: Call) -> c10d.Work:
        """Return the Work of what was queued on the link's stream last."""
        end = self._spare.pop() if self._spare else _new_event()
        end.record(self.stream)
        # tensors live until a wait is queued: after that the waiting stream's own order protects them
        return c10d.PythonCallbackWork(_Pending(end, self._spare, self._device, call.args))

    def close(self) -> None:
        """Let what is under way end before the scratch buffer goes."""
        self.stream.synchronize()

    def _duration_ns(self, call: Call, size: int) -> int:
        """Return how long the link takes for so many bytes, ns."""
        duration_ns = round(size * self._ns_per_byte)
        if duration_ns > LONGEST_NS:
            raise UsageError(
                f"A simulated link holds a GPU for at most {LONGEST_NS / 1e9:g} s a collective",
                given=f"{size} bytes in {call.operation.name}: {duration_ns / 1e9:.1f} s",
                remedy="take a faster link (--link-gbps) or fewer tokens",
            )
        return duration_ns

    @contextmanager
    def _after_current_stream(self) -> Iterator[None]:
        """Queue what is launched inside behind the current stream's work so far."""
        with self._lock, torch.cuda.device(self._device):
            self._ready.record(torch.cuda.current_stream(self._device))
            self.stream.wait_event(self._ready)
            yield


def _is_copy(call: Call, size: int) -> bool:
    """Whether a collective of one rank copies its input to its output, in a form that the link's kernel can carry."""
    if call.operation.name not in COPIES_ALONE:
        return False
    output, source = call.args[0], call.args[1]
    return bool(
        output.is_contiguous()
        and source.is_contiguous()
        and output.numel() * output.element_size() == source.numel() * source.element_size() == size
        and (output.data_ptr() | source.data_ptr() | size) % VECTOR_BYTES == 0
    )


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
