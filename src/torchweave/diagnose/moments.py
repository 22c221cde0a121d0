"""The moments to charge: one side alone while the other has work to come, and nothing running at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.intervals import Intervals, complement, overlaps, union
from torchweave.trace.timeline import Flags, Ints


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments in which an operation should have been running and was not.

    Attributes:
        begin: Begins, ns.
        end: Ends, ns.
        pending: The next operation of what was not running, row of the window's work.
        side: The side that was running, NO_SIDE for none.
    """

    begin: Ints
    end: Ints
    pending: Ints
    side: Ints

    def __len__(self) -> int:
        return len(self.begin)


def lost_moments(window: Window, sides: Sides) -> Moments:
    """Return the moments in which exactly one side ran and the other still had an operation to come."""
    parts = []
    for waiting, running in ((FIRST_SIDE, SECOND_SIDE), (SECOND_SIDE, FIRST_SIDE)):
        begin, end, pending = _gaps(window, sides.side == waiting)
        gap, _, alone = overlaps(begin, end, window.busy(sides.side == running))
        parts.append((alone, pending[gap], np.full(len(gap), running, dtype=np.int64)))
    both = np.concatenate([alone for alone, _, _ in parts])
    return Moments(
        both[:, 0],
        both[:, 1],
        np.concatenate([pending for _, pending, _ in parts]),
        np.concatenate([side for _, _, side in parts]),
    )


def idle_moments(window: Window, sides: Sides) -> Moments:
    """Return the moments in which nothing ran on any stream; the next operation on the sides' devices is what waits.

    Where none is to come there, the next operation of all; of several that begin at once, one that has a side.
    """
    begin, end, pending = _gaps(window, np.ones(len(window.work), dtype=np.bool_))
    work, sided = window.work, sides.side > 0
    on_devices = np.isin(work.device, np.unique(work.device[sided])) & (work.end > work.begin)
    rows = np.flatnonzero(on_devices)
    rows = rows[np.lexsort((~sided[rows], work.begin[rows]))]
    at = np.searchsorted(work.begin[rows], end, side="left")
    known = at < len(rows)
    pending = np.where(known, np.append(rows, 0)[np.where(known, at, 0)], pending)
    return Moments(begin, end, pending, np.zeros(len(begin), dtype=np.int64))


def _gaps(window: Window, mask: Flags) -> tuple[Ints, Ints, Ints]:
    """Return the gaps before each busy time of some work: begin, end, and the operation that ends them."""
    rows = np.flatnonzero(mask)
    # operations without length end no gap
    rows = rows[window.work.end[rows] > window.work.begin[rows]]
    busy: Intervals = union(np.column_stack((window.work.begin[rows], window.work.end[rows])))
    if len(busy) == 0:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    gaps = complement(busy, window.begin, int(busy[-1, 0]))
    first = rows[np.searchsorted(window.work.begin[rows], gaps[:, 1], side="left")] if len(gaps) else rows[:0]
    return gaps[:, 0], gaps[:, 1], first
