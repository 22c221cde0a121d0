"""The order that a program asks the device for, call by call: events, waits, synchronizations, collectives, backward.

torch's own callbacks (`torch.cuda._gpu_trace`) are not used: torch calls them also while an exception propagates, and
loses that exception.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from torchweave.record.device import pointer_of
from torchweave.record.patches import LAUNCHES, Patches
from torchweave.record.writer import Writer
from torchweave.trace.log import (
    BACKWARD,
    BACKWARD_END,
    COLLECTIVES,
    DRIVER_FREE,
    JOIN,
    RECORD,
    SYNC_DEVICE,
    SYNC_EVENT,
    SYNC_STREAM,
    UNSEEN,
    WAIT,
)

# gets what a call returned and was given, and returns for each event to write what it holds
_Told: TypeAlias = Callable[..., Iterable[tuple[int, ...]]]


class Handed(threading.local):
    """Whether the collective that this thread launches hands its `Work` to Python, which then waits for it there.

    Attributes:
        on: Whether it does. What C++ launches by itself (DDP), C++ waits for.
    """

    on = False


def patch_order(patches: Patches, writer: Writer, streams: Callable[[], Iterable[int]], handed: Handed) -> None:
    """Replace what orders the device's work, so that the log has each call, those within other calls too.

    Args:
        patches: Remembers what was there.
        writer: Where to write.
        streams: Returns the streams that are current on this thread, of all devices.
        handed: Set while Python launches a collective.
    """

    def put(owner: Any, name: str, kind: int, told: _Told) -> None:
        patches.put(owner, name, functools.partial(_asked, writer, kind, told))

    put(torch.cuda.Event, "record", RECORD, _of_event)
    put(torch.cuda.Event, "wait", WAIT, _of_event)
    put(torch.cuda.Event, "synchronize", SYNC_EVENT, lambda _, event: [(id(event),)])
    put(torch.cuda.Event, "query", SYNC_EVENT, lambda over, event: [(id(event),)] if over else [])
    put(torch.cuda.Stream, "wait_event", WAIT, _of_other_event)
    put(torch.cuda.Stream, "synchronize", SYNC_STREAM, lambda _, stream: [(pointer_of(stream),)])
    put(torch.cuda.Stream, "query", SYNC_STREAM, lambda over, stream: [(pointer_of(stream),)] if over else [])
    for module in (torch.cuda, torch.accelerator):
        put(module, "synchronize", SYNC_DEVICE, _nothing)
    for module in (torch.cuda, torch.cuda.memory):
        put(module, "empty_cache", DRIVER_FREE, _nothing)
    number = itertools.count()
    for module in (torch.autograd, torch.autograd.graph):
        patches.put(module, "_engine_run_backward", lambda old: _backward(writer, streams, number, old))
    c10d = getattr(torch._C, "_distributed_c10d", None)
    if c10d is None:
        return

    def waited(*_: Any, **__: Any) -> Iterator[tuple[int, ...]]:
        for stream in streams():
            yield stream, COLLECTIVES

    for owner, names in (
        (c10d.Work, ("wait", "synchronize", "block_current_stream")),
        (torch._C.Future, ("wait", "value")),
    ):
        for name in names:
            put(owner, name, JOIN, waited)
    put(c10d.Work, "is_completed", SYNC_STREAM, lambda over, _: [(COLLECTIVES,)] if over else [])
    # whoever takes the future waits for it where nobody sees it
    put(c10d.Work, "get_future", SYNC_STREAM, lambda *_: [(COLLECTIVES,)])
    for name in LAUNCHES:
        patches.put(c10d.ProcessGroup, name, lambda old: _handing(handed, old))


def _asked(writer: Writer, kind: int, told: _Told, old: Any) -> Callable[..., Any]:
    """Return a function that writes events down when it has been called."""

    @functools.wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not writer.on:
            return old(*args, **kwargs)
        # looked for before: what is written soon after the call is found in the trace by its time
        place = writer.place_or_backward(sys._getframe(1))
        result = old(*args, **kwargs)
        for values in told(result, *args, **kwargs):
            writer.event(kind, place, *values, task=torch._C._current_graph_task_id())
        return result

    return call


def _of_event(_: Any, event: Any, stream: Any = None) -> list[tuple[int, ...]]:
    # an address that is used again does no harm: an event stands for nothing before it is recorded
    return [(id(event), pointer_of(torch.cuda.current_stream() if stream is None else stream))]


def _of_other_event(_: Any, stream: Any, event: Any) -> list[tuple[int, ...]]:
    # `torch.Event` is C, and so are its methods: nobody saw its record, nor sees its wait
    return [] if isinstance(event, torch.cuda.Event) else [(UNSEEN, pointer_of(stream))]


def _nothing(*_: Any, **__: Any) -> list[tuple[int, ...]]:
    return [()]


def _backward(
    writer: Writer, streams: Callable[[], Iterable[int]], numbers: Iterator[int], old: Callable[..., Any]
) -> Callable[..., Any]:
    def tell(kind: int, number: int) -> None:
        if writer.on:
            for stream in streams():
                writer.event(kind, -1, number, stream, task=torch._C._current_graph_task_id())

    @functools.wraps(old)
    def run(*args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        tell(BACKWARD, number)
        try:
            return old(*args, **kwargs)
        finally:
            tell(BACKWARD_END, number)

    return run


def _handing(handed: Handed, old: Any) -> Callable[..., Any]:
    @functools.wraps(old)
    def launch(*args: Any, **kwargs: Any) -> Any:
        before, handed.on = handed.on, True
        try:
            return old(*args, **kwargs)
        finally:
            handed.on = before

    return launch
