"""Lost moments are more than what was lost: how much each of them counts.

Both sides wait by turns, so the charged moments of one turn last longer than what was lost in it. A *turn* is a
time of the greater side alone with the time of the lesser side alone that follows it. What was lost in a turn is the
lesser side's time alone; the moments charged in the turn share it. So a part of a trace with little to lose cannot
take the loss of another part.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchweave.diagnose.charges import Charges
from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.intervals import Intervals, difference, length
from torchweave.trace.timeline import Ints


def lost_cost(window: Window, sides: Sides, found: Charges) -> npt.NDArray[np.float64]:
    """Return what each charge of lost overlap counts, ns; the sum is what was lost.

    Args:
        window: The work.
        sides: Its sides.
        found: Charges of lost overlap, at least one.
    """
    busy = [window.busy(sides.side == side) for side in (FIRST_SIDE, SECOND_SIDE)]
    lesser, greater = sorted(busy, key=length)
    lost, rest = difference(lesser, greater), difference(greater, lesser)
    time = (found.end - found.begin).astype(np.float64)
    borders = _turns(lost, rest)
    turn, of_lost = np.searchsorted(borders, found.begin, side="right"), _turn_of(borders, lost)
    size = len(borders) + 1
    charged = np.bincount(turn, weights=time, minlength=size)
    loss = np.bincount(of_lost, weights=(lost[:, 1] - lost[:, 0]).astype(np.float64), minlength=size)
    share = np.divide(loss, charged, out=np.zeros(size), where=charged > 0)
    cost: npt.NDArray[np.float64] = time * share[turn]
    if cost.sum() <= 0:
        cost = time
    # turns in which nothing could be charged leave their loss to all others
    cost *= length(lost) / cost.sum()
    return cost


def _turns(lost: Intervals, rest: Intervals) -> Ints:
    """Return where turns begin: the greater side alone again, after the lesser side was."""
    begin = np.concatenate((lost[:, 0], rest[:, 0]))
    greater = np.concatenate((np.zeros(len(lost), dtype=np.bool_), np.ones(len(rest), dtype=np.bool_)))
    order = np.argsort(begin, kind="stable")
    greater = greater[order]
    again = np.concatenate(([False], greater[1:] & ~greater[:-1]))
    return np.asarray(begin[order][again], dtype=np.int64)


def _turn_of(borders: Ints, intervals: Intervals) -> Ints:
    return np.asarray(np.searchsorted(borders, intervals[:, 0], side="right"), dtype=np.int64)
