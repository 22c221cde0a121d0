"""The program's `record_function` scopes and its own profilers, which have to live with ours.

A scope that begins under one profiler and ends under the next makes torch write its end into memory that is gone. So
scopes that are open where a recording ends are ended there, under the profiler that they began under, and begun again
in the next recording; ending a scope twice does nothing. And there is one profiler a process: where the program starts
one of its own, ours has to be gone before.

Source: `RecordFunction::end` and `KinetoThreadLocalState` in torch's C++ sources.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd import profiler

from torchweave.record.patches import Patches


class Scopes:
    """The scopes that are open on the thread that watches, the outermost first."""

    def __init__(self) -> None:
        self._open: list[Any] = []
        self._owner = threading.get_ident()

    def put(self, patches: Patches) -> None:
        """Follow scopes as they begin and end."""
        patches.put(profiler.record_function, "__enter__", self._entered)
        patches.put(profiler.record_function, "__exit__", self._left)

    def end(self) -> None:
        """End all open scopes under the profiler that runs."""
        for scope in reversed(self._open):
            if scope.record is not None:
                torch.ops.profiler._record_function_exit._RecordFunction(scope.record)

    def begin_again(self) -> None:
        """Begin all open scopes under the profiler that runs."""
        for scope in self._open:
            scope.record = torch.ops.profiler._record_function_enter_new(scope.name, scope.args)

    def _entered(self, old: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(old)
        def enter(scope: Any) -> Any:
            result = old(scope)
            if threading.get_ident() == self._owner:
                self._open.append(scope)
            return result

        return enter

    def _left(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def leave(scope: Any, *error: Any) -> Any:
            # scopes are objects that can be kept, and left in any order
            self._open[:] = [one for one in self._open if one is not scope]
            return old(scope, *error)

        return leave


def before_other_profilers(patches: Patches, give_way: Callable[[FrameType], None]) -> None:
    """Have something called before any profiler starts.

    Args:
        patches: Remembers what was there.
        give_way: Called with a frame inside whoever starts it; ours come here too.
    """

    def first(old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def start(*args: Any, **kwargs: Any) -> Any:
            give_way(sys._getframe(1))
            return old(*args, **kwargs)

        return start

    for name in ("_prepare_profiler", "_enable_profiler"):
        patches.put(profiler, name, first)


def is_profiling() -> bool:
    """Return whether a profiler of torch runs on this thread."""
    return bool(torch._C._autograd._profiler_enabled())
