"""Reads where other threads are, without which neither a sample nor an error about a wait could name a line."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# From 3.12 on, Python collects garbage between two instructions only. Before, the frame object that `f_back` makes
# could begin a collection, whose finalizers let the other thread run on and leave that very frame: what was then
# written into it was somebody else's memory.
_COLLECTS_WITHIN = sys.version_info < (3, 12)


@contextlib.contextmanager
def others() -> Iterator[dict[int, FrameType]]:
    """Give the innermost frames of all other threads, safe to be followed outwards within the block.

    A frame that outlives the block keeps its thread's objects alive: keep none.

    Yields:
        The frames by the threads' identifiers (`threading.get_ident`).
    """
    hold = _COLLECTS_WITHIN and gc.isenabled()
    if hold:
        gc.disable()
    try:
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        yield frames
    finally:
        if hold:
            gc.enable()
