"""The lines of the program's calls into torch, at a fifth of what seeing every operator costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from torchweave.record.writer import Writer, now

# reading an attribute of a tensor asks nothing of a device, and `backward()` is written down by itself
_OTHERS = ("__get__", "__set__", "backward")


class Functions(TorchFunctionMode):
    """Writes down each outermost call of a function of torch, and nothing of its memory.

    Args:
        writer: Where to.
        most: So many entries are enough.
        enough: Called when there are so many.
    """

    def __init__(self, writer: Writer, *, most: int = 200_000, enough: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._writer, self._most, self._enough = writer, most, enough

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        writer = self._writer
        name = getattr(func, "__name__", "call")
        if not writer.on or name in _OTHERS:
            return func(*args, **(kwargs or {}))
        begin = now()
        result = func(*args, **(kwargs or {}))
        writer.span(begin, writer.place_or_backward(sys._getframe()), writer.name(name))
        if writer.tables.num_spans >= self._most:
            self._enough()
        return result
