"""Lost moments are more than what was lost: how much each of them counts.

Both sides wait by turns, so the charged moments of one turn last longer than what was lost in it. A *turn* is a time
of the greater side alone with the time of the lesser side alone that follows it. What was lost in a turn is the
lesser side's time alone; the moments charged in the turn share it, up to their own length, those first in which what
waited was launched already; what is more goes to the turns before. So a part of a trace with little to lose cannot
take the loss of another part.
"""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.causes import CODE
from torchweave.diagnose.charges import Charges
from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE
from torchweave.diagnose.pending import read_pending
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.intervals import Intervals, difference, length
from torchweave.trace.timeline import Floats, Ints


def lost_cost(window: Window, sides: Sides, found: Charges) -> Floats:
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
    # of what was launched in time the device's own reasons decide; a host that came late as well changed nothing
    held = (read_pending(window).issued[found.pending] <= found.begin) & (found.cause != CODE["unknown"])
    charged = [np.bincount(turn, weights=time * which, minlength=size).astype(np.float64) for which in (held, ~held)]
    loss = np.bincount(of_lost, weights=lost[:, 1] - lost[:, 0], minlength=size).astype(np.float64)
    shares = [
        np.divide(taken, room, out=np.zeros(size), where=room > 0)
        for taken, room in zip(_in_two(loss, *charged), charged, strict=True)
    ]
    cost: Floats = time * np.where(held, shares[0][turn], shares[1][turn])
    if cost.sum() <= 0:
        cost = time
    cost *= length(lost) / cost.sum()
    return cost


def _in_two(loss: Floats, first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Return how much of the loss each turn takes in two rooms: the first is filled before the second."""
    here = np.minimum(loss, first)
    more = _settle(loss - here, first - here + second)
    also = np.minimum(more, first - here)
    return here + also, more - also


def _settle(loss: Floats, room: Floats) -> Floats:
    """Return how much of the loss each turn takes: none more than its charged moments last.

    What a turn has no room for goes to the turns before it, the nearest first: what ran alone late could have run
    beside what was alone before. What is left then goes to later turns.
    """
    taken, left = _pour(loss[::-1].tolist(), room[::-1].tolist())
    taken = taken[::-1]
    if left > 0:
        rest = (room - np.array(taken)).tolist()
        more, _ = _pour([left] + [0.0] * (len(rest) - 1), rest)
        taken = [a + b for a, b in zip(taken, more, strict=True)]
    return np.array(taken)


def _pour(loss: list[float], room: list[float]) -> tuple[list[float], float]:
    """Fill rooms in order, carrying on what does not fit; return what each took, and what was left at the end."""
    taken, carried = [], 0.0
    for here, most in zip(loss, room, strict=True):
        carried += here
        part = min(carried, most)
        taken.append(part)
        carried -= part
    return taken, carried


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
