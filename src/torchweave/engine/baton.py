"""IDEA: a baton that one thread hands to another, who stays awake for a while before it sleeps.

On a virtual machine a processor that has gone idle takes about 100 us to come back, as long as many a strand's whole
turn. Waiting awake in Python would take the interpreter from the very strand that is waited for. So the waiting is
done by a C function called without the interpreter's lock: POSIX's `lfind` compares a key with the elements of an
array, and with elements of size 0 it looks at one byte again and again, at most so often as the array is long.

Source: lfind, POSIX.1-2017; ctypes releases the interpreter's lock around a call (`ctypes.CDLL`).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import torch

# a look takes about 2 ns: 2 ms, longer than a host takes for most turns
_LOOKS = ctypes.c_size_t(1_000_000)
_HERE, _AWAY = b"1", b"0"
# a device's process has that many processors for its own threads, or none to spare for waiting
_ENOUGH_PROCESSORS = 4


class Baton:
    """A lock that is taken by one thread and released by the other; it is away at first.

    Args:
        awake: Whether whoever waits stays awake for a while.
    """

    __slots__ = ("_cell", "_lock", "_look")

    def __init__(self, *, awake: bool) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._cell = ctypes.create_string_buffer(_AWAY)
        self._look = _looker(self._cell) if awake else None

    @property
    def is_away(self) -> bool:
        """Whether it has not been handed over."""
        return self._lock.locked()

    def hand(self) -> None:
        """Hand it over."""
        self._lock.release()
        self._cell.value = _HERE

    def take(self, limit_s: float) -> bool:
        """Wait until it is handed over, and say whether it was.

        Args:
            limit_s: How long to wait, seconds.
        """
        if not self._lock.acquire(False):
            if self._look is not None:
                self._look()
            # the byte is a hint alone, this decides
            if not self._lock.acquire(timeout=limit_s):
                return False
        self._cell.value = _AWAY
        return True


def batons() -> dict[str, Baton]:
    """Return one for each strand, both away."""
    awake = may_stay_awake()
    return {"forward": Baton(awake=awake), "backward": Baton(awake=awake)}


def may_stay_awake() -> bool:
    """Whether this process has processors to spare for waiting: it uses a GPU, and several processors for each."""
    return torch.cuda.is_initialized() and _num_processors() >= _ENOUGH_PROCESSORS * torch.cuda.device_count()


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find() -> tuple[Callable[..., int | None], ctypes.c_void_p] | None:
    """Return `lfind` and the address of `strcmp`, or None where the C library has them not."""
    try:
        library = ctypes.CDLL(None)
        find, compare = library.lfind, ctypes.cast(library.strcmp, ctypes.c_void_p)
    except (AttributeError, OSError, TypeError):
        return None
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p] * 5
    return find, compare


_FIND = _find()
_KEY = ctypes.create_string_buffer(_HERE)


def _looker(cell: ctypes.Array[ctypes.c_char]) -> Callable[[], object] | None:
    if _FIND is None:
        return None
    find, compare = _FIND
    # ctypes keeps the buffers alive: they are a constant's, and the baton's own
    words = (ctypes.addressof(_KEY), ctypes.addressof(cell), ctypes.addressof(_LOOKS), 0, compare)
    return lambda: find(*words)
