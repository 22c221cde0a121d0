"""Every operator of the program: from which line, on which stream, which memory it reads and writes.

A dispatch mode is the one place that sees all of them, backward's on autograd's threads included. It costs some
microseconds an operator; what it costs is measured and told.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.record.device import pointer_of
from torchweave.record.order import Handed
from torchweave.record.plans import Does, Plan, plan_of
from torchweave.record.writer import Writer, now
from torchweave.trace.log import ALLOCATE, COLLECTIVES, DENSE, JOIN, KEEP, SYNC_STREAM, WRITTEN


class Operators(TorchDispatchMode):
    """Writes down each operator.

    Args:
        writer: Where to.
        on_device: Whether a tensor's memory is the device's.
        current_stream: Returns the CUDA stream that is current for a device, by its ordinal.
        handed: Whether this thread launches a collective for which Python will wait.
        most: So many entries are enough.
        enough: Called when there are so many.
    """

    def __init__(
        self,
        writer: Writer,
        on_device: Callable[[torch.Tensor], bool],
        current_stream: Callable[[int], int],
        *,
        handed: Handed | None = None,
        most: int = 200_000,
        enough: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most, self._enough = most, enough
        self._writer, self._on_device, self._current_stream = writer, on_device, current_stream
        self._handed = handed or Handed()
        self._plans: dict[Any, Plan | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compilation alone: what is compiled stays compiled while it is watched."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say the same to older versions of torch."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        writer = self._writer
        if not writer.on:
            return func(*args, **kwargs)
        for kind in types:
            if kind is not torch.Tensor and kind is not torch.nn.Parameter:
                # a subclass takes it apart first (DTensor); what it is made of comes here again
                return NotImplemented
        try:
            plan = self._plans[func]
        except KeyError:
            plan = self._plans[func] = plan_of(func, writer)
        if plan is None:
            return func(*args, **kwargs)
        begin = now()
        result = func(*args, **kwargs)
        # from here on: on a thread of autograd there may be no frame further out
        place = writer.place_or_backward(sys._getframe())
        writer.span(begin, place, plan.name)
        if writer.tables.num_spans >= self._most:
            self._enough()
        if plan.does is Does.KEEP:
            self._keep(args, place)
        elif not plan.is_idle:
            self._accesses(plan, _Call(args, kwargs, result), place)
        return result

    def _accesses(self, plan: Plan, call: _Call, place: int) -> None:
        """Write down the memory that an operator touched, and the stream that it was sent to."""
        on_device, writer = self._on_device, self._writer
        found: list[tuple[torch.Tensor, int]] = []
        for position, name, flags in plan.arguments:
            found += [(item, flags) for item in _tensors(call.argument(position, name)) if on_device(item)]
        made = [item for item in _tensors(call.result) if on_device(item)] if plan.makes else []
        if not found and not made:
            return
        memory: list[int] = []
        for tensor, flags in found:
            memory += _memory(tensor, flags)
        stream = self._stream_of(found[0][0] if found else made[0])
        known = {0, *memory[::4]}
        for tensor in made:
            row = _memory(tensor, WRITTEN)
            if row and row[0] not in known:
                known.add(row[0])
                writer.event(ALLOCATE, place, row[0], self._stream_of(tensor))
            if plan.writes:
                memory += row
        task = torch._C._current_graph_task_id()
        if plan.does is not Does.NOTHING:
            self._ordered(plan, call, memory, place, stream, task)
        elif memory:
            writer.operator(plan.name, place, memory, stream, task=task)

    def _ordered(self, plan: Plan, call: _Call, memory: list[int], place: int, current: int, task: int) -> None:
        """Write down an operator, and for whom it waits, or who for it."""
        tell = functools.partial(self._writer.event, task=task)
        if plan.does is Does.WAIT:
            tell(JOIN, place, current, COLLECTIVES)
            return
        stream, before, after = current, [], []
        if plan.does is Does.COPY:
            # one between devices waits for both of them, and both wait for it
            before = after = [each for each in self._streams_of(call) if each != current]
        elif self._is_apart(plan, call):
            stream, before = COLLECTIVES, [current]
        for other in before:
            tell(JOIN, place, stream, other)
        if memory:
            self._writer.operator(plan.name, place, memory, stream, task=task)
        for other in after:
            tell(JOIN, place, other, stream)
        if _host_waits(plan, call, self._on_device):
            tell(SYNC_STREAM, place, current)

    def _stream_of(self, tensor: torch.Tensor) -> int:
        return self._current_stream(tensor.device.index or 0)

    def _streams_of(self, call: _Call) -> list[int]:
        """Return the streams that are current for the devices of a copy."""
        return [self._stream_of(tensor) for tensor in call.ends() if self._on_device(tensor)]

    def _keep(self, args: tuple[Any, ...], place: int) -> None:
        tensor, stream = args[0], args[1]
        if self._on_device(tensor):
            memory = _memory(tensor, 0)
            if memory:
                self._writer.event(KEEP, place, memory[0], pointer_of(stream))

    def _is_apart(self, plan: Plan, call: _Call) -> bool:
        """Return whether an operator is a collective that runs on a stream of its own until Python waits for it.

        One that is waited for at once, or that C++ launches and waits for, is taken to run on the current stream.
        """
        if plan.does is not Does.COLLECT:
            return plan.does is Does.COLLECT_APART
        # sends and receives have no choice
        return self._handed.on and (plan.option is None or bool(call.argument(*plan.option, default=True)))


@dataclass(slots=True)
class _Call:
    """One call of an operator.

    Attributes:
        args: As it was given.
        kwargs: As it was given.
        result: What it returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def argument(self, position: int, name: str, *, default: Any = None) -> Any:
        """Return an argument, by its position and name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both sides of a copy."""
        return self.args[0], self.args[1] if len(self.args) > 1 else self.result


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of an argument or a result; a collective's are lists, beside its work."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return ()


def _host_waits(plan: Plan, call: _Call, on_device: Callable[[torch.Tensor], bool]) -> bool:
    """Return whether the host has certainly waited for an operator."""
    if plan.does is Does.READ:
        return True
    if plan.does is Does.MASK:
        masks = [item for item in _tensors(call.argument(1, "indices")) if item.dtype in (torch.bool, torch.uint8)]
        return any(on_device(item) for item in masks)
    if plan.does is not Does.COPY or plan.option is None or call.argument(*plan.option, default=False):
        return False
    one, other = call.ends()
    crosses = on_device(one) != on_device(other) and "meta" not in (one.device.type, other.device.type)
    return crosses and one.numel() > 0


def _base(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's allocation, without making an object of Python for its storage."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def _memory(tensor: torch.Tensor, flags: int) -> tuple[int, ...]:
    """Return a tensor's allocation, its bytes from the first to the last, and whether it touches all of them."""
    if tensor.layout is not torch.strided:
        return ()
    try:
        base, low = _base(tensor), tensor.data_ptr()
    except RuntimeError:
        # fake and batched tensors have no memory of their own
        return ()
    size = tensor.element_size()
    numel = tensor.numel()
    if tensor.is_contiguous():
        extent = numel
    else:
        extent = 1 + sum(
            (length - 1) * abs(stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        extent = extent if numel else 0
    return base, low, low + extent * size, flags | (DENSE if extent == numel else 0)


class OnThreads:
    """Puts a mode on threads, and takes it off only where it is on top: others' modes are theirs."""

    def __init__(self, mode: TorchDispatchMode | TorchFunctionMode) -> None:
        self._mode: Any = mode
        self._local = threading.local()
        functions = isinstance(mode, TorchFunctionMode)
        self._size = torch._C._len_torch_function_stack if functions else torch._C._len_torch_dispatch_stack
        self._at = torch._C._get_function_stack_at if functions else torch._C._get_dispatch_stack_at

    def enter(self) -> None:
        """Put the mode on this thread, if it is not on it."""
        if not getattr(self._local, "on", False):
            self._mode.__enter__()
            self._local.on = True

    def leave(self) -> None:
        """Take the mode off this thread, if it lies on top."""
        size = self._size()
        if getattr(self._local, "on", False) and size and self._at(size - 1) is self._mode:
            self._mode.__exit__(None, None, None)
            self._local.on = False
