"""Charges: moments of lost overlap and idle time, each with the one cause it is charged to, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.trace.timeline import Flags, Ints


@dataclass(frozen=True, slots=True)
class Charges:
    """Moments that were charged, in no order, none overlapping another of the same kind.

    Attributes:
        begin: Begins, ns.
        end: Ends, ns.
        cause: Codes of causes (`causes.CODE`).
        pending: The operation that could not start, row of the window's work.
        call: The call behind it, row of the timeline's calls, or -1.
        blocker: The operation behind it, row of the window's work, or -1.
        likely: True where it fits best and is not proven.
        lost: True for lost overlap, False for idle time.
    """

    begin: Ints
    end: Ints
    cause: Ints
    pending: Ints
    call: Ints
    blocker: Ints
    likely: Flags
    lost: Flags

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, rows: Ints | Flags) -> Charges:
        """Return some of the charges."""
        return Charges(**{name: getattr(self, name)[rows] for name in Charges.__slots__})


def charges(
    begin: Ints,
    end: Ints,
    cause: Ints | int,
    pending: Ints,
    *,
    lost: Flags | bool,
    call: Ints | int = -1,
    blocker: Ints | int = -1,
    likely: Flags | bool = False,
) -> Charges:
    """Make charges of columns and constants; empty moments are left out."""
    size = len(begin)
    keep = end > begin

    def column(value: Ints | int) -> Ints:
        return np.broadcast_to(np.asarray(value, dtype=np.int64), (size,))[keep]

    def flags(value: Flags | bool) -> Flags:
        return np.broadcast_to(np.asarray(value, dtype=np.bool_), (size,))[keep]

    return Charges(
        begin[keep],
        end[keep],
        column(cause),
        pending[keep],
        column(call),
        column(blocker),
        flags(likely),
        flags(lost),
    )


def join(parts: list[Charges]) -> Charges:
    """Return all parts as one."""
    return Charges(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Charges.__slots__})
