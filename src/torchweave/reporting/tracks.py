"""What the drawn reports show beside the lanes, computed once for all of them."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.model import FIRST_SIDE, NO_SIDE, SECOND_SIDE, Diagnosis
from torchweave.intervals import EMPTY, Intervals, intersection, union


def both_sides(diagnosis: Diagnosis) -> Intervals:
    """Return the moments in which both sides ran, ns since the window's begin."""
    return intersection(_busy(diagnosis, FIRST_SIDE), _busy(diagnosis, SECOND_SIDE))


def side_name(diagnosis: Diagnosis, side: int) -> str:
    """Return the name of a value of `Lane.side`, empty for work of neither side."""
    names = diagnosis.sides.names
    return "" if side == NO_SIDE or len(names) < side else names[side - 1]


def _busy(diagnosis: Diagnosis, side: int) -> Intervals:
    parts = [np.column_stack((lane.begin, lane.end))[lane.side == side] for lane in diagnosis.lanes]
    return union(np.concatenate(parts)) if parts else EMPTY
