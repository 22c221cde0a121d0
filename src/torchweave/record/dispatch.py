"""Every operator of the program: from which line, on which stream, which memory it reads and writes.

A dispatch mode is the one place that sees all of them, backward's on autograd's threads included. It costs some
microseconds an operator; what it costs is measured and told.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.record.writer import Writer, now
from torchweave.trace.log import KEEP

WRITTEN, DENSE = 1, 2
# these make memory and leave it as it is
_NO_WRITE = re.compile(r"^aten::(?:new_)?empty(?:_like|_strided|_permuted|_quantized)?$")
# and these change only what a tensor says of itself
_NO_ACCESS = frozenset({"aten::set_", "aten::resize_", "aten::record_stream", "aten::_unsafe_view", "aten::lift_fresh"})


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to look at of an operator, from its schema.

    Attributes:
        name: Row of its name.
        arguments: Position, name and flags of each argument whose memory it touches.
        outputs: Whether its results are memory that it wrote.
        keeps: Whether it is `record_stream`.
    """

    name: int
    arguments: tuple[tuple[int, str, int], ...]
    outputs: bool
    keeps: bool


class Operators(TorchDispatchMode):
    """Writes down each operator.

    Args:
        writer: Where to.
        on_device: Whether a tensor's memory is the device's.
        current_stream: Returns the CUDA stream that is current for a device, by its ordinal.
        most: So many entries are enough.
        enough: Called when there are so many.
    """

    def __init__(
        self,
        writer: Writer,
        on_device: Callable[[torch.Tensor], bool],
        current_stream: Callable[[int], int],
        *,
        most: int = 200_000,
        enough: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most, self._enough = most, enough
        self._writer, self._on_device, self._current_stream = writer, on_device, current_stream
        self._plans: dict[Any, _Plan | None] = {}

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
            plan = self._plans[func] = _plan(func, writer)
        if plan is None:
            return func(*args, **kwargs)
        begin, first_event = now(), writer.tables.num_events
        result = func(*args, **kwargs)
        # from here on: on a thread of autograd there may be no frame further out
        place = writer.place_or_backward(sys._getframe())
        writer.span(begin, place, plan.name)
        if writer.tables.num_spans >= self._most:
            self._enough()
        if plan.keeps:
            self._keep(args, place)
        elif plan.arguments or plan.outputs:
            self._accesses(plan, args, kwargs, result, place, first_event)
        return result

    def _accesses(
        self,
        plan: _Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        place: int,
        first_event: int,
    ) -> None:
        """Write down the memory that an operator touched, and the stream that it was sent to."""
        found: list[tuple[torch.Tensor, int]] = []
        on_device = self._on_device
        size = len(args)
        for position, name, flags in plan.arguments:
            value = args[position] if position < size else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                if on_device(value):
                    found.append((value, flags))
            elif isinstance(value, (list, tuple)):
                found += [(item, flags) for item in value if isinstance(item, torch.Tensor) and on_device(item)]
        if plan.outputs:
            found += [(item, WRITTEN) for item in _tensors(result) if on_device(item)]
        if not found:
            return
        memory: list[int] = []
        for tensor, flags in found:
            memory += _memory(tensor, flags)
        if memory:
            stream = self._current_stream(found[0][0].device.index or 0)
            self._writer.operator(plan.name, place, first_event, memory, stream)

    def _keep(self, args: tuple[Any, ...], place: int) -> None:
        tensor, stream = args[0], args[1]
        if self._on_device(tensor):
            pointer = getattr(stream, "cuda_stream", None)
            if pointer is None:
                pointer = torch.cuda.Stream(
                    stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
                ).cuda_stream
            memory = _memory(tensor, 0)
            if memory:
                self._writer.event(KEEP, place, memory[0], pointer)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result; a collective's are a list beside its work."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _tensors(item)


def _plan(func: Any, writer: Writer) -> _Plan | None:
    """Return what to look at of an operator; None for what is no plain operator."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    schema = func._schema
    name = writer.name(schema.name)
    if schema.name in _NO_ACCESS:
        return _Plan(name, (), False, schema.name == "aten::record_stream")
    arguments = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        # an alias that is not written is a view's: nothing is read yet
        if "Tensor" in str(argument.type) and (alias is None or alias.is_write):
            arguments.append((position, argument.name, WRITTEN if alias is not None else 0))
    fresh = any("Tensor" in str(value.type) and value.alias_info is None for value in schema.returns)
    views = any(argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments)
    if views or _NO_WRITE.match(schema.name):
        # a view reads nothing; neither does what only takes a shape
        return _Plan(name, (), False, False)
    return _Plan(name, tuple(arguments), fresh, False)


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
