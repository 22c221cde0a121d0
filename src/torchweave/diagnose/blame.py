"""Every moment of lost overlap and of idle time gets one cause. The rules are in the docs, "The rules of blame"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.diagnose.causes import CODE
from torchweave.diagnose.charges import Charges, charges, join
from torchweave.diagnose.host import ISSUING, Host, held_by, read_host
from torchweave.diagnose.moments import Moments, idle_moments, lost_moments
from torchweave.diagnose.peers import NOT_LATE
from torchweave.diagnose.pending import EventWaits, Pending, causes_of_waits, event_waits, read_pending
from torchweave.diagnose.queue import charge_issuing
from torchweave.diagnose.ready import charge_ready
from torchweave.diagnose.shared import cause_of_sharing, share_one_stream
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.trace.timeline import Flags, Ints

# A gap this short before an operation that is already issued is the device's own.
DEVICE_GAP_NS = 15_000


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the rules look at."""

    window: Window
    sides: Sides
    pending: Pending
    host: Host
    late_until: Ints
    late_is_known: Flags
    sharing: int


def blame(window: Window, sides: Sides, late_until: Ints, *, late_is_known: Flags | None = None) -> Charges:
    """Charge every moment of lost overlap and of idle time once.

    Args:
        window: The work.
        sides: Its two sides.
        late_until: For each operation, until when it waited for a late peer, ns, or `NOT_LATE`.
        late_is_known: For each operation, whether that is known from other ranks, and not estimated; None for none.
    """
    if late_is_known is None:
        late_is_known = np.zeros(len(window.work), dtype=np.bool_)
    sharing = cause_of_sharing(window, sides)
    facts = _Facts(window, sides, read_pending(window), read_host(window), late_until, late_is_known, sharing)
    lost = lost_moments(window, sides)
    if share_one_stream(window, sides):
        # the cause that put both sides there takes everything that was possible
        parts = [charges(lost.begin, lost.end, sharing, lost.pending, lost=True)]
    else:
        parts = _charge_moments(facts, lost, lost=True)
    return join(parts + _charge_moments(facts, idle_moments(window, sides), lost=False))


def _charge_moments(facts: _Facts, moments: Moments, *, lost: bool) -> list[Charges]:
    """Cut each moment where its operation was issued, its stream free, its event done, and charge the parts."""
    row, pending = moments.pending, facts.pending
    issued = np.clip(pending.issued[row], moments.begin, moments.end)
    # an operation issued early would have started at once: what the device takes for it is the late launch's too
    latency = (issued > moments.begin) & (moments.end - issued <= DEVICE_GAP_NS)
    begun = np.where(latency, moments.end, issued)
    parts = _not_issued(facts, moments, issued, begun, lost)
    free, behind = _behind_own_stream(facts, moments, begun, lost)
    parts.append(behind)
    rows = np.unique(row)
    waits = event_waits(facts.window, pending, rows)
    at = np.searchsorted(rows, row)
    done, waiting = _waiting_for_event(facts, moments, free, rows, waits, at, lost)
    parts += waiting
    if lost:
        ready = Moments(done, moments.end, row, moments.side)
        parts += _ready(facts, ready)
    else:
        parts.append(charges(done, moments.end, CODE["unknown"], row, lost=False))
    return parts


def _not_issued(facts: _Facts, moments: Moments, issued: Ints, begun: Ints, lost: bool) -> list[Charges]:
    """Charge the time before the launch call ended to what the launching thread did, and what follows likewise."""
    parts = []
    thread = facts.pending.thread[moments.pending]
    logical = np.where(thread >= 0, facts.host.thread[np.maximum(thread, 0)], -1)
    for code in np.unique(logical[logical >= 0]).tolist():
        mine = np.flatnonzero(logical == code)
        line = facts.host.lines[code]
        piece, at, times = held_by(line, moments.begin[mine], issued[mine])
        source = mine[piece]
        times[:, 1] = np.where(times[:, 1] == issued[source], begun[source], times[:, 1])
        row, side = moments.pending[source], moments.side[source]
        known = line.label[at] != ISSUING
        parts.append(
            charges(
                times[known, 0],
                times[known, 1],
                line.label[at[known]],
                row[known],
                lost=lost,
                call=line.call[at[known]],
                likely=line.likely[at[known]],
            )
        )
        rest = Moments(times[~known, 0], times[~known, 1], row[~known], side[~known])
        parts.append(charge_issuing(facts.window, facts.sides, facts.pending, rest, lost=lost))
    return parts


def _behind_own_stream(facts: _Facts, moments: Moments, issued: Ints, lost: bool) -> tuple[Ints, Charges]:
    """Charge the time in which the operation before it on its own stream, of the other side, still ran."""
    before = facts.pending.before[moments.pending]
    row = np.maximum(before, 0)
    # one of no length did not hold it up: what held that one held both
    ran = (before >= 0) & (facts.window.work.end[row] > facts.window.work.begin[row])
    end = np.where(ran, facts.window.work.end[row], moments.begin)
    free = np.clip(end, issued, moments.end)
    other = facts.sides.side[row] == moments.side
    cause = np.where(other, facts.sharing, CODE["unknown"])
    return free, charges(issued, free, cause, moments.pending, lost=lost, blocker=before)


def _waiting_for_event(
    facts: _Facts, moments: Moments, begin: Ints, rows: Ints, waits: EventWaits, at: Ints, lost: bool
) -> tuple[Ints, list[Charges]]:
    """Charge the time until the awaited operation's end to the wait, or to the peer that came late to it."""
    work = facts.window.work
    cause, likely, blocker = causes_of_waits(facts.window, facts.sides, facts.pending, rows, waits)
    held = waits.awaited >= 0
    awaited = np.maximum(waits.awaited, 0)
    end = np.where(held[at], work.begin[rows][at], begin) if lost else np.where(held[at], work.end[awaited][at], begin)
    done = np.clip(end, begin, moments.end)
    peer = np.clip(np.where(held, facts.late_until[awaited], NOT_LATE)[at], begin, done)
    call = waits.call[at]
    by, guess = blocker[at], ~facts.late_is_known[awaited][at]
    late = charges(begin, peer, CODE["late_peer"], moments.pending, lost=lost, call=call, blocker=by, likely=guess)
    rest = charges(peer, done, cause[at], moments.pending, lost=lost, call=call, blocker=by, likely=likely[at])
    return done, [late, rest]


def _ready(facts: _Facts, moments: Moments) -> list[Charges]:
    """Charge the time in which the operation was ready; a short one is the device's own."""
    long = moments.end - moments.begin > DEVICE_GAP_NS
    own = charges(moments.begin[~long], moments.end[~long], CODE["unknown"], moments.pending[~long], lost=True)
    return [own, _charge_long(facts, moments, long)]


def _charge_long(facts: _Facts, moments: Moments, long: Flags) -> Charges:
    return charge_ready(
        facts.window,
        facts.sides,
        facts.pending,
        moments.begin[long],
        moments.end[long],
        moments.pending[long],
        moments.side[long],
    )
