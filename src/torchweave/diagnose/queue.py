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
from torchweave.trace.timeline import Floats, Ints

# With this many operations waiting on a stream the launch call blocks (1,022 were measured; events take places too).
FULL_QUEUE = 950
# A queue that lasts this long beyond the moment is deep: launching is not what holds the running side up.
_DEEP_NS = 30_000
# Of so many launches, the operations last at most so many times longer than they are launched apart: launching is slow.
_AROUND, _TIMES_APART = 9, 2.0


def charge_issuing(window: Window, sides: Sides, pending: Pending, moments: Moments, *, lost: bool) -> Charges:
    """Charge moments in which the launching thread was launching.

    Where nothing ran, launching itself was too slow: `launch_bound`. Where the other side ran, its queue decides:
    full is `launch_queue_full`, deep is `issued_late`, nearly empty is `launch_bound`. Launching is not too slow
    where operations last much longer than they are launched apart: then one was simply launched late.
    """
    length, apart = launching_around(window, pending, moments.pending)
    slow = np.asarray(length <= _TIMES_APART * apart)
    if not lost:
        cause = np.where(slow, CODE["launch_bound"], CODE["unknown"])
        return charges(moments.begin, moments.end, cause, moments.pending, lost=False)
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
            [count >= FULL_QUEUE, (reach - times[:, 0] >= _DEEP_NS) | ~slow[mine][piece]],
            [CODE["launch_queue_full"], CODE["issued_late"]],
            CODE["launch_bound"],
        )
        parts.append(charges(times[:, 0], times[:, 1], cause, moments.pending[mine][piece], lost=True))
    return join(parts)


def launching_around(window: Window, pending: Pending, rows: Ints) -> tuple[Floats, Floats]:
    """Return, for some operations, how long those launched around it last, and how far apart they were launched, ns."""
    work = window.work
    at, launch = np.unique(pending.launch, return_inverse=True)
    # what one call launched counts together: a graph's replay is one launch
    length = np.bincount(launch.reshape(-1), weights=work.end - work.begin).astype(np.float64)
    apart = np.diff(at, prepend=at[:1]).astype(np.float64)
    # the first has none before it; alone, nothing says that launching was fast
    apart[0] = apart[1] if len(at) > 1 else length[0]
    here = launch.reshape(-1)[rows]
    return _median_around(length, here), _median_around(apart, here)


def _median_around(values: Floats, at: Ints) -> Floats:
    """Return the median of the nine values around each of some positions."""
    reach = min(_AROUND, len(values))
    begin = np.clip(at - reach // 2, 0, len(values) - reach)
    return np.asarray(np.median(values[begin[:, None] + np.arange(reach)], axis=1), dtype=np.float64)


def _queue(window: Window, pending: Pending, rows: Ints, at: Ints) -> tuple[Ints, Ints]:
    """Return how many operations of a side were issued and not ended at each moment, and when the last will end."""
    order = rows[np.argsort(pending.issued[rows], kind="stable")]
    issued = pending.issued[order]
    reach = np.maximum.accumulate(window.work.end[order])
    num_issued = np.searchsorted(issued, at, side="right")
    num_ended = np.searchsorted(np.sort(window.work.end[rows]), at, side="right")
    last = np.where(num_issued > 0, reach[np.maximum(num_issued - 1, 0)], at)
    return (num_issued - num_ended).astype(np.int64), last.astype(np.int64)
