"""Why an operation that was issued and waited for nothing did not start: the device's own reasons."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.causes import CODE
from torchweave.diagnose.charges import Charges, charges
from torchweave.diagnose.pending import Pending
from torchweave.diagnose.room import no_room
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.intervals import overlaps
from torchweave.trace.timeline import COPY, ON_DEVICE, Flags, Ints

# How soon after its reason has gone an operation starts, at most.
_SOON_NS = 15_000
# Behind another operation of one hardware queue it starts this soon after that one's start.
_QUEUE_NS = 10_000
_CLOCK_NS = 2_000
# The number that the recorders give the default stream: CUPTI 7, ROCm 0.
_DEFAULT_STREAMS = (7, 0)
_LEAST_CHANGES, _NEARLY_ALL = 3, 0.7


def charge_ready(
    window: Window, sides: Sides, pending: Pending, begin: Ints, end: Ints, rows: Ints, side: Ints
) -> Charges:
    """Charge moments in which an operation was ready and the other side ran.

    In this order: both copy in one direction; the running kernel leaves no room; they share a hardware queue; the
    default stream orders them; unknown.

    Args:
        window: The work.
        sides: Its sides.
        pending: Its facts.
        begin: Begins of the moments, ns.
        end: Their ends.
        rows: The ready operation of each.
        side: The side that ran.
    """
    piece, running, times = _running(window, sides, begin, end, side)
    row = rows[piece]
    work = window.work
    beside = np.maximum(running, 0)
    copies = (work.kind[row] == COPY) & (work.kind[beside] == COPY) & (running >= 0)
    copies &= (work.direction[row] == work.direction[beside]) & (work.direction[row] != ON_DEVICE)
    together = work.device[row] == work.device[beside]
    copies &= together
    full = no_room(window, np.where(together, running, -1), row)
    queue = _shares_queue(window, pending)[row]
    default = _ordered_by_default_stream(window, sides, pending)[row]
    # when it was issued has to be known: else it may not have been
    known = work.call[row] >= 0
    choices = [known & reason for reason in (copies, full, queue, default)]
    codes = [CODE[name] for name in ("copy_engine", "sm_full", "max_connections", "legacy_default_stream")]
    cause = np.select(choices, codes, CODE["unknown"])
    blocker = np.where(queue & ~copies & ~full, pending.issued_before[row], running)
    likely = (cause == CODE["max_connections"]) | (cause == CODE["legacy_default_stream"])
    return charges(times[:, 0], times[:, 1], cause, row, lost=True, blocker=blocker, likely=likely)


def _running(window: Window, sides: Sides, begin: Ints, end: Ints, side: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut moments by what ran in them: for each piece the moment, the running operation, and the time."""
    work = window.work
    parts = []
    for value in np.unique(side):
        mine = np.flatnonzero(side == value)
        rows = np.flatnonzero(sides.side == value)
        reach = np.maximum.accumulate(work.end[rows])
        starts = np.maximum(work.begin[rows], np.concatenate(([np.iinfo(np.int64).min], reach[:-1])))
        keep = reach > starts
        keep &= work.end[rows] > starts
        shown = np.column_stack((starts, work.end[rows]))[keep]
        piece, at, times = overlaps(begin[mine], end[mine], shown)
        parts.append((mine[piece], rows[keep][at], times))
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, np.zeros((0, 2), dtype=np.int64)
    return (
        np.concatenate([part[0] for part in parts]),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]),
    )


def _shares_queue(window: Window, pending: Pending) -> Flags:
    """Return which operations started just after the start of the one issued before them on another stream."""
    work = window.work
    other = np.maximum(pending.issued_before, 0)
    after_start = work.begin - work.begin[other]
    return np.asarray(
        (pending.issued_before >= 0)
        & (after_start >= -_CLOCK_NS)
        & (after_start <= _QUEUE_NS)
        # it was issued long before: that it starts now is no accident of the host
        & (work.begin - pending.issued > 2 * _SOON_NS)
        # and not merely when that one, or its own predecessor, made way
        & (work.begin < work.end[other] - _CLOCK_NS)
    )


def _ordered_by_default_stream(window: Window, sides: Sides, pending: Pending) -> Flags:
    """Return which operations start just after the end of one across the default stream's border."""
    work = window.work
    result = np.zeros(len(work), dtype=np.bool_)
    # each device has a default stream of its own
    for device in np.unique(work.device[sides.side > 0]):
        here = work.device == device
        result |= here & _ordered_on_device(window, sides, pending, here)
    return result


def _ordered_on_device(window: Window, sides: Sides, pending: Pending, here: Flags) -> Flags:
    work = window.work
    default = np.isin(work.stream, _DEFAULT_STREAMS)
    result = np.zeros(len(work), dtype=np.bool_)
    for mine in (True, False):
        rows, others = np.flatnonzero(here & (default == mine)), np.flatnonzero(here & (default != mine))
        if len(rows) == 0 or len(others) == 0:
            continue
        ends = np.sort(work.end[others])
        at = np.searchsorted(ends, work.begin[rows] + _CLOCK_NS, side="right") - 1
        near = (at >= 0) & (work.begin[rows] - ends[np.maximum(at, 0)] <= _SOON_NS)
        # nothing across the border runs on while it starts
        reach = np.maximum.accumulate(work.end[others])
        begun = np.searchsorted(work.begin[others], work.begin[rows], side="right") - 1
        clear = (begun < 0) | (reach[np.maximum(begun, 0)] <= work.begin[rows] + _CLOCK_NS)
        result[rows] = near & clear
    # one such start can be chance; ordering shows in nearly all changes around it that the device decided on
    issued_early = work.begin - pending.issued > 2 * _SOON_NS
    order = np.flatnonzero(here)
    crossing = order[np.concatenate(([False], default[order[1:]] != default[order[:-1]]))]
    changes = crossing[(sides.side[crossing] != 0) & issued_early[crossing]]
    return result & _often(result[changes], changes, len(work))


def _often(hits: Flags, rows: Ints, size: int) -> Flags:
    """Return, for each of `size` rows, whether nearly all of the nearest nine hits are true, of at least three."""
    if len(hits) < _LEAST_CHANGES:
        return np.zeros(size, dtype=np.bool_)
    reach = min(9, len(hits))
    sums = np.convolve(hits.astype(np.float64), np.ones(reach), mode="valid") / reach
    nearest = np.searchsorted(rows, np.arange(size))
    return np.asarray(sums[np.clip(nearest - reach // 2, 0, len(sums) - 1)] >= _NEARLY_ALL)
