"""The numbers that a cause's evidence is written from."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchweave.diagnose.calls import outer_operator
from torchweave.diagnose.causes import CODE, Facts
from torchweave.diagnose.charges import Charges
from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE
from torchweave.diagnose.pending import Pending
from torchweave.diagnose.queue import launching_around
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.intervals import union
from torchweave.trace.timeline import Ints

_LONGEST_NAME = 60
_PAUSE_NS = 20_000


def facts(window: Window, sides: Sides, pending: Pending, found: Charges, lost_ms: float, idle_ms: float) -> Facts:
    """Return the facts about the charges of one cause.

    Args:
        window: The work.
        sides: Its sides.
        pending: Its facts.
        found: The charges, at least one.
        lost_ms: Lost overlap charged, scaled.
        idle_ms: Idle time charged.
    """
    timeline, work = window.timeline, window.work
    behind = np.unique(found.call[found.call >= 0])
    codes, counts = np.unique(timeline.calls.name[behind], return_counts=True) if len(behind) else ((), ())
    order = np.argsort(-np.asarray(counts), kind="stable").tolist() if len(behind) else []
    took = (timeline.calls.end - timeline.calls.begin)[behind] if len(behind) else np.zeros(1)
    dearest = int(np.argmax(found.end - found.begin))
    # charges are cut at every border that a rule looked at; a moment is what was charged with no pause worth the name
    moments = union(np.column_stack((found.begin, found.end + _PAUSE_NS)))
    waiting = int(found.pending[dearest])
    here = window.lane == window.lane[waiting]
    values: dict[str, Any] = {
        "pending_op": short(timeline.names[work.name[waiting]]),
        "pending_stream": int(work.stream[waiting]),
        "longest_ms": float((moments[:, 1] - moments[:, 0]).max() - _PAUSE_NS) / 1e6,
        "where_op": _operator(window, found, dearest),
        "first_ops": int((here & (sides.side == FIRST_SIDE)).sum()),
        "second_ops": int((here & (sides.side == SECOND_SIDE)).sum()),
    }
    values |= dict(zip(("first", "second"), sides.found.names, strict=False))
    if found.cause[0] == CODE["launch_bound"]:
        values |= _launching(window, pending, np.unique(found.pending))
    values |= _copy(window, found)
    values |= _blocker(window, found)
    values["queue"] = _queue(window, pending, sides, found)
    return Facts(
        lost_ms=lost_ms,
        idle_ms=idle_ms,
        count=len(moments),
        calls=tuple((timeline.names[codes[row]], int(counts[row])) for row in order),
        median_us=float(np.median(took)) / 1e3,
        values=values,
    )


def short(name: str) -> str:
    """Return a kernel's name without its template and its arguments, cut to a length that a line can hold."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    plain = name.removeprefix("void ")
    for mark in ("<", "("):
        at = plain.find(mark, 1)
        # names such as `(anonymous namespace)::` are kept
        if at > 0 and not plain.startswith("(anonymous") and "(anonymous" not in plain[at : at + 11]:
            plain = plain[:at]
    return plain if len(plain) <= _LONGEST_NAME else plain[: _LONGEST_NAME - 3] + "..."


def _operator(window: Window, found: Charges, row: int) -> str:
    timeline = window.timeline
    call = int(found.call[row]) if found.call[row] >= 0 else int(window.work.call[found.pending[row]])
    op = int(timeline.calls.op[call]) if call >= 0 else -1
    return outer_operator(timeline, op) or "no operator"


def _launching(window: Window, pending: Pending, rows: Ints) -> dict[str, Any]:
    """Return how long operations around these are, how far apart they were launched, and how soon these started."""
    length, apart = launching_around(window, pending, rows)
    return {
        "kernel_us": float(np.median(length)) / 1e3,
        "interval_us": float(np.median(apart)) / 1e3,
        "lead_us": max(0.0, float(np.median(window.work.begin[rows] - pending.issued[rows])) / 1e3),
    }


def _copy(window: Window, found: Charges) -> dict[str, Any]:
    """Return the name of a pageable copy of the window, if its call is behind the charges."""
    work = window.work
    rows = np.flatnonzero(work.pageable & np.isin(work.call, found.call[found.call >= 0]))
    return {"copy_name": window.timeline.names[work.name[rows[0]]]} if len(rows) else {}


def _blocker(window: Window, found: Charges) -> dict[str, Any]:
    """Return what the dearest moment with a blocking operation says about it."""
    rows = np.flatnonzero(found.blocker >= 0)
    if len(rows) == 0:
        return {}
    row = rows[int(np.argmax((found.end - found.begin)[rows]))]
    work, operation = window.work, int(found.blocker[row])
    device = window.timeline.devices.get(int(work.device[operation]))
    return {
        "blocker": short(window.timeline.names[work.name[operation]]),
        "blocker_stream": int(work.stream[operation]),
        "blocker_ms": float(work.end[operation] - work.begin[operation]) / 1e6,
        "blocks": int(work.blocks[operation]),
        "threads": int(work.threads[operation]),
        "sms": device.num_sms if device else "?",
    }


def _queue(window: Window, pending: Pending, sides: Sides, found: Charges) -> int:
    """Return how many operations of the running side were issued and not ended, at most, in the charged moments."""
    work = window.work
    most = 0
    for value in (FIRST_SIDE, SECOND_SIDE):
        rows = np.flatnonzero(sides.side == value)
        at = found.end[sides.side[found.pending] != value]
        issued = np.searchsorted(np.sort(pending.issued[rows]), at, side="right")
        ended = np.searchsorted(np.sort(work.end[rows]), at, side="right")
        most = max(most, int((issued - ended).max(initial=0)))
    return most
