"""Whether work ran slower beside the other side than alone: the same kernel, in the same trace."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.facts import short
from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.diagnose.words import duration
from torchweave.intervals import overlaps
from torchweave.trace.timeline import KERNEL, Floats

# alone: at most this share of it beside the other side; beside: at least the rest
_ALONE = 0.05
# how often a kernel has to have run each way, and how much longer counts
_LEAST_RUNS, _LONGER = 3, 1.15
_MOST_REMARKS = 3


def remarks(window: Window, sides: Sides) -> tuple[str, ...]:
    """Return a sentence for each kernel that took clearly longer beside the other side, the dearest first.

    Collectives are left out: their length depends on their peers.
    """
    if not sides.two:
        return ()
    work = window.work
    share = _beside(window, sides)
    rows = np.flatnonzero((work.kind == KERNEL) & (sides.side > 0) & ~sides.communication)
    keys = np.column_stack((work.name[rows], work.blocks[rows], work.threads[rows], sides.side[rows]))
    _, like = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(like.reshape(-1), kind="stable")
    groups = np.split(rows[order], np.cumsum(np.bincount(like.reshape(-1)))[:-1]) if len(rows) else []
    length = work.end - work.begin
    found = []
    for mine in groups:
        alone, beside = length[mine[share[mine] <= _ALONE]], length[mine[share[mine] >= 1 - _ALONE]]
        if min(len(alone), len(beside)) < _LEAST_RUNS:
            continue
        before, after = float(np.median(alone)), float(np.median(beside))
        if before > 0 and after > _LONGER * before:
            name = short(window.timeline.names[work.name[mine[0]]])
            found.append(((after - before) * len(beside), _sentence(name, before, after, len(alone), len(beside))))
    return tuple(text for _, text in sorted(found, reverse=True)[:_MOST_REMARKS])


def _sentence(name: str, before: float, after: float, num_alone: int, num_beside: int) -> str:
    return (
        f"stretched: {name} took {after / before:.2f} times as long beside the other side as alone "
        f"({duration(after / 1e3)}, {num_beside} times, against {duration(before / 1e3)}, {num_alone} times)."
    )


def _beside(window: Window, sides: Sides) -> Floats:
    """Return which share of each operation the other side ran beside it, 0 to 1."""
    work = window.work
    time = np.zeros(len(work))
    for mine, other in ((FIRST_SIDE, SECOND_SIDE), (SECOND_SIDE, FIRST_SIDE)):
        rows = np.flatnonzero(sides.side == mine)
        row, _, both = overlaps(work.begin[rows], work.end[rows], window.busy(sides.side == other))
        time += np.bincount(rows[row], weights=(both[:, 1] - both[:, 0]).astype(np.float64), minlength=len(work))
    return np.asarray(time / np.maximum(work.end - work.begin, 1), dtype=np.float64)
