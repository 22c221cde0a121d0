"""Times in which the host was simply launching: too slow for the kernels, too late for this side, or stuck."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.causes import CODE
from torchweave.diagnose.charges import Charges, charges, join
from torchweave.diagnose.moments import Moments
from torchweave.diagnose.pending import Pending
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.intervals import overlaps
from torchweave.trace.timeline import Ints

# With this many operations waiting on a stream the launch call blocks (1,022 were measured; events take places too).
FULL_QUEUE = 950
# A queue that lasts this long beyond the moment is deep: launching is not what holds the running side up.
_DEEP_NS = 30_000


def charge_issuing(window: Window, sides: Sides, pending: Pending, moments: Moments, *, lost: bool) -> Charges:
    """Charge moments in which the launching thread was launching.

    Where nothing ran, launching itself was too slow: `launch_bound`. Where the other side ran, its queue decides:
    full is `launch_queue_full`, deep is `issued_late`, nearly empty is `launch_bound`.
    """
    if not lost:
        return charges(moments.begin, moments.end, CODE["launch_bound"], moments.pending, lost=False)
    parts = [charges(*(np.zeros(0, dtype=np.int64),) * 4, lost=True)]
    for value in np.unique(moments.side):
        mine = np.flatnonzero(moments.side == value)
        rows = np.flatnonzero(sides.side == value)
        # a queue changes when an operation begins or ends: cut the moments there
        borders = np.unique(window.work.begin[rows])
        steps = np.column_stack((borders, np.append(borders[1:], window.end)))
        piece, _, times = overlaps(moments.begin[mine], moments.end[mine], steps[steps[:, 1] > steps[:, 0]])
        count, reach = _queue(window, pending, rows, times[:, 0])
        cause = np.select(
            [count >= FULL_QUEUE, reach - times[:, 0] >= _DEEP_NS],
            [CODE["launch_queue_full"], CODE["issued_late"]],
            CODE["launch_bound"],
        )
        parts.append(charges(times[:, 0], times[:, 1], cause, moments.pending[mine][piece], lost=True))
    return join(parts)


def _queue(window: Window, pending: Pending, rows: Ints, at: Ints) -> tuple[Ints, Ints]:
    """Return how many operations of a side were issued and not ended at each moment, and when the last will end."""
    order = rows[np.argsort(pending.issued[rows], kind="stable")]
    issued = pending.issued[order]
    reach = np.maximum.accumulate(window.work.end[order])
    num_issued = np.searchsorted(issued, at, side="right")
    num_ended = np.searchsorted(np.sort(window.work.end[rows]), at, side="right")
    last = np.where(num_issued > 0, reach[np.maximum(num_issued - 1, 0)], at)
    return (num_issued - num_ended).astype(np.int64), last.astype(np.int64)
