"""What the drawn reports show beside the lanes, computed once for all of them."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE, Diagnosis
from torchweave.intervals import EMPTY, Intervals, intersection, union


def both_sides(diagnosis: Diagnosis) -> Intervals:
    """Return the moments in which both sides ran, ns since the window's begin."""
    return intersection(_busy(diagnosis, FIRST_SIDE), _busy(diagnosis, SECOND_SIDE))


def side_titles(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the sides' names as they are shown: `stream:7` is `stream 7`."""
    return tuple(name.replace(":", " ", 1) for name in diagnosis.sides.names)


def _busy(diagnosis: Diagnosis, side: int) -> Intervals:
    parts = [np.column_stack((lane.begin, lane.end))[lane.side == side] for lane in diagnosis.lanes]
    return union(np.concatenate(parts)) if parts else EMPTY
