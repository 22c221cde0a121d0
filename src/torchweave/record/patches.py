"""Functions that are replaced while a program is watched, so that their lines are known; all are put back."""

from __future__ import annotations

import functools
import sys
import threading
import time
import timeit
from collections.abc import Callable
from typing import Any, Protocol

import torch

from torchweave.record.writer import Writer, now

_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")
# methods that wait, or ask a stream to
_STREAM = ("synchronize", "wait_stream", "wait_event", "record_event")
_EVENT = ("record", "wait", "synchronize")
# of a process group: what launches a collective
LAUNCHES = (
    "allgather",
    "_allgather_base",
    "allreduce",
    "all_gather_single",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "scatter",
    "send",
)


class Modes(Protocol):
    """What is put on threads, and taken off."""

    def enter(self) -> None:
        """Put it on this thread."""

    def leave(self) -> None:
        """Take it off."""


class Patches:
    """Attributes that were replaced."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute, if its owner has it.

        Args:
            owner: A module or class.
            name: The attribute.
            make: Makes the new one of the old one.
        """
        old = owner.__dict__.get(name, None)
        if old is None:
            return
        self._old.append((owner, name, old))
        setattr(owner, name, make(old))

    def restore(self) -> None:
        """Put everything back, the last first."""
        while self._old:
            owner, name, old = self._old.pop()
            setattr(owner, name, old)


def patch_all(patches: Patches, writer: Writer, modes: Modes) -> None:
    """Replace everything whose lines the log needs.

    Args:
        patches: Remembers what was there.
        writer: Where to write.
        modes: What new threads of the program get.
    """
    for name in _CLOCKS:
        patches.put(time, name, functools.partial(_clock, writer, name))
    patches.put(timeit.Timer, "timeit", functools.partial(_timeit, writer))
    patches.put(threading.Thread, "start", lambda old: _start(writer, modes, old))
    outermost = threading.local()

    def spanned(name: str) -> Callable[[Any], Any]:
        return lambda old: _spanned(writer, outermost, name, old)

    for module in (torch.autograd, torch.autograd.graph):
        patches.put(module, "_engine_run_backward", lambda old: _backward(writer, old))
    for name in _STREAM:
        patches.put(torch.cuda.Stream, name, spanned(name))
    for name in _EVENT:
        patches.put(torch.cuda.Event, name, spanned(name))
    patches.put(torch.cuda, "synchronize", spanned("synchronize"))
    for module in (torch.cuda, torch.cuda.memory):
        patches.put(module, "empty_cache", spanned("empty_cache"))
    patches.put(torch.cuda.Stream, "__new__", lambda old: _made(writer, old))
    patches.put(torch.cuda, "set_stream", lambda old: _used(writer, old))
    c10d = getattr(torch._C, "_distributed_c10d", None)
    if c10d is not None:
        patches.put(c10d.Work, "wait", spanned("wait"))
        for name in LAUNCHES:
            patches.put(c10d.ProcessGroup, name, spanned(name))


def _clock(writer: Writer, name: str, old: Callable[[], Any]) -> Callable[[], Any]:
    # so that it pickles, and shows, as the clock that it is
    @functools.wraps(old)
    def read() -> Any:
        value = old()
        if writer.on:
            writer.clock(name, sys._getframe(1))
        return value

    return read


def _timeit(writer: Writer, old: Callable[..., float]) -> Callable[..., float]:
    # it took its clock before anybody could wrap it
    @functools.wraps(old)
    def run(*args: Any, **kwargs: Any) -> float:
        if not writer.on:
            return old(*args, **kwargs)
        place = writer.place(sys._getframe(1))
        writer.timed("timeit", place)
        try:
            return old(*args, **kwargs)
        finally:
            writer.timed("timeit", place)

    return run


def _start(writer: Writer, modes: Modes, old: Callable[[threading.Thread], None]) -> Callable[[Any], None]:
    @functools.wraps(old)
    def start(thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            modes.enter()
            try:
                run()
            finally:
                # a mode must not outlive its thread's interpreter state
                modes.leave()
                thread.__dict__.pop("run", None)

        if writer.on:
            thread.run = watched  # type: ignore[method-assign]
        old(thread)

    return start


def _spanned(writer: Writer, outermost: threading.local, name: str, old: Any) -> Callable[..., Any]:
    """Return a function that writes down where it was called; of calls within calls, the outermost only."""

    @functools.wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not writer.on or getattr(outermost, "inside", False):
            return old(*args, **kwargs)
        outermost.inside = True
        begin, place = now(), writer.place_or_backward(sys._getframe(1))
        try:
            return old(*args, **kwargs)
        finally:
            outermost.inside = False
            writer.span(begin, place, writer.name(name))

    return call


def _backward(writer: Writer, old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not writer.on:
            return old(*args, **kwargs)
        begin, place = now(), writer.place(sys._getframe(1))
        # one called by a library belongs to the line of the outer one; several threads can have one each
        running = [place] if place >= 0 else []
        writer.backwards += running
        try:
            return old(*args, **kwargs)
        finally:
            for row in running:
                writer.backwards.remove(row)
            writer.span(begin, place, writer.name("backward"))

    return run


def _made(writer: Writer, old: Any) -> Callable[..., Any]:
    """Write down stream objects that the program makes; the streams that torch itself looks at are no new ones."""
    make = old.__func__ if isinstance(old, staticmethod) else old

    @functools.wraps(make)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        stream = make(cls, *args, **kwargs)
        if "stream_id" not in kwargs:
            place, external = writer.place(sys._getframe(1)), "stream_ptr" in kwargs
            stream._torchweave_row = writer.streams.add(int(stream.cuda_stream), place, external=external)
        return stream

    return staticmethod(new)  # type: ignore[return-value]


def _used(writer: Writer, old: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(old)
    def set_stream(stream: Any) -> None:
        if writer.on:
            row = getattr(stream, "_torchweave_row", -1)
            writer.tables.uses.extend((now(), writer.thread(), row, int(stream.cuda_stream)))
        old(stream)

    return set_stream
