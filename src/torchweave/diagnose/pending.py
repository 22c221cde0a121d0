"""Facts about operations that could not start: when they were issued, and what stood before them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.diagnose.calls import WAIT_EVENT, names_matching
from torchweave.diagnose.causes import CODE
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window, launch_begin, launch_thread
from torchweave.trace.link import under
from torchweave.trace.timeline import Flags, Ints

# How soon after its event an operation starts, at most: the device's own latency and two clocks.
EVENT_LATENCY_NS = 20_000
_CLOCK_NS = 1_000
# An operation this short that begins so shortly before another waited for the same; so many of them.
_COMPANION_NS, _COMPANIONS = 5_000, 3
_ACCUMULATE = "torch::autograd::AccumulateGrad"
# How many operations that ended just before are tried as the one that was waited for.
_TRIES = 12


@dataclass(frozen=True, slots=True)
class Pending:
    """Columns over all operations of a window; only those of pending operations are looked at.

    Attributes:
        launch: Begin of the launch call, ns.
        issued: End of the launch call, ns; the begin of the window where it was not recorded.
        thread: Thread of the launch call, -1 where it was not recorded.
        before: The operation before it on its own stream, row of the window's work, -1 for the first.
        issued_before: The operation issued before it on any other stream of its device, or -1.
    """

    launch: Ints
    issued: Ints
    thread: Ints
    before: Ints
    issued_before: Ints


def read_pending(window: Window) -> Pending:
    """Return the facts about every operation of a window."""
    work, calls = window.work, window.timeline.calls
    launch = launch_begin(window.timeline, work)
    known = work.call >= 0
    issued = np.where(known, calls.end[work.call], window.begin) if len(calls) else np.full(len(work), window.begin)
    return Pending(
        launch=launch,
        issued=issued,
        thread=launch_thread(window.timeline, work),
        before=_before(window),
        issued_before=_issued_before(window, launch),
    )


def _before(window: Window) -> Ints:
    lane, work = window.lane, window.work
    # rows without length and without a launch are no operations that anything stands behind
    rows = np.flatnonzero((work.end > work.begin) | (work.call >= 0))
    order = rows[np.argsort(lane[rows], kind="stable")]
    result = np.full(len(lane), -1, dtype=np.int64)
    same = lane[order[1:]] == lane[order[:-1]]
    result[order[1:][same]] = order[:-1][same]
    return result


def _issued_before(window: Window, launch: Ints) -> Ints:
    """Return the last operation of another stream of the same device in the order of issue."""
    result = np.full(len(launch), -1, dtype=np.int64)
    for device in np.unique(window.work.device):
        rows = np.flatnonzero(window.work.device == device)
        order = rows[np.argsort(launch[rows], kind="stable")]
        lanes = window.lane[order]
        position = np.arange(len(order), dtype=np.int64)
        # the last position at which the stream changed: everything from there on is the operation's own stream
        starts = np.maximum.accumulate(np.where(np.concatenate(([True], lanes[1:] != lanes[:-1])), position, 0))
        result[order] = np.where(starts > 0, order[np.maximum(starts - 1, 0)], -1)
    return result


@dataclass(frozen=True, slots=True)
class EventWaits:
    """For pending operations: the event that held them.

    Attributes:
        call: The wait call, row of the timeline's calls, -1 where no event held the operation.
        awaited: The operation whose end the event stood for, row of the window's work, or -1.
        named: True where the recording itself names the event's record.
    """

    call: Ints
    awaited: Ints
    named: Flags


def event_waits(window: Window, pending: Pending, rows: Ints) -> EventWaits:
    """Find the event that held each operation, if one did.

    An event held it if a wait was asked for between the launch of the operation before it on its stream and its own
    launch, and it started just after the end of an operation of another stream that was launched before that wait.

    Args:
        window: The work.
        pending: Its facts.
        rows: The operations to look at.
    """
    waits, launched_before, named = _wait_calls(window, pending, rows)
    awaited = _awaited(window, pending, rows, launched_before, waits >= 0)
    held = awaited >= 0
    return EventWaits(np.where(held, waits, -1), awaited, named & held)


def _wait_calls(window: Window, pending: Pending, rows: Ints) -> tuple[Ints, Ints, Flags]:
    """Return the last wait call for each operation, its time, and whether it names its event."""
    timeline, work = window.timeline, window.work
    before = _before_companions(window, pending, rows)
    after = np.where(before >= 0, pending.launch[np.maximum(before, 0)], np.iinfo(np.int64).min)
    until = pending.launch[rows]
    if len(timeline.waits):
        return _recorded_waits(window, rows, after, until)
    # only the calls are recorded, without their streams
    calls = timeline.calls
    found = np.flatnonzero(names_matching(timeline, WAIT_EVENT)[calls.name])
    at = np.searchsorted(calls.begin[found], until, side="right") - 1
    call = found[np.maximum(at, 0)] if len(found) else np.zeros(len(rows), dtype=np.int64)
    good = (at >= 0) & (len(found) > 0) & (work.call[rows] >= 0)
    begin = calls.begin[call] if len(calls) else call
    good &= begin > after
    return np.where(good, call, -1), np.where(good, begin, 0), np.zeros(len(rows), dtype=np.bool_)


def _before_companions(window: Window, pending: Pending, rows: Ints) -> Ints:
    """Return the operation before each on its stream, short ones that ran just before it passed over.

    A memset of a microsecond before a kernel is held by what holds both; cut to microseconds it may have no length.
    """
    work = window.work
    before = pending.before[rows]
    for _ in range(_COMPANIONS):
        row = np.maximum(before, 0)
        short = (before >= 0) & (work.call[row] >= 0) & (work.end[row] - work.begin[row] <= _COMPANION_NS)
        short &= work.begin[rows] - work.begin[row] <= _COMPANION_NS
        before = np.where(short, pending.before[row], before)
    return before


def _recorded_waits(window: Window, rows: Ints, after: Ints, until: Ints) -> tuple[Ints, Ints, Flags]:
    timeline, work = window.timeline, window.work
    waits, calls = timeline.waits, timeline.calls
    call, begin = np.full(len(rows), -1, dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    named = np.zeros(len(rows), dtype=np.bool_)
    order = np.argsort(calls.correlation, kind="stable")
    for stream in np.unique(work.stream[rows]):
        of = np.flatnonzero(waits.stream == stream)
        mine = np.flatnonzero(work.stream[rows] == stream)
        at = np.searchsorted(waits.begin[of], until[mine], side="right") - 1
        good = at >= 0
        good[good] = waits.begin[of[at[good]]] > after[mine[good]]
        wait = of[at[good]]
        hit = mine[good]
        found = np.searchsorted(calls.correlation[order], waits.correlation[wait])
        found = order[np.minimum(found, len(order) - 1)] if len(order) else found
        call[hit], begin[hit] = found, waits.begin[wait]
        named[hit] = waits.record_correlation[wait] >= 0
    return call, begin, named


def _awaited(window: Window, pending: Pending, rows: Ints, wait_at: Ints, waits: Flags) -> Ints:
    """Return the operation of another stream that ended just before each one started, launched before its wait.

    One of its own device is looked for first: that another device's work ends just then is more often chance.
    """
    work = window.work
    result = np.full(len(rows), -1, dtype=np.int64)
    devices = np.unique(work.device)
    for device in devices.tolist():
        mine = waits & (work.device[rows] == device)
        _look_back(window, pending, rows, wait_at, mine, np.flatnonzero(work.device == device), result)
    if len(devices) > 1:
        _look_back(window, pending, rows, wait_at, waits, np.arange(len(work)), result)
    return result


def _look_back(
    window: Window, pending: Pending, rows: Ints, wait_at: Ints, waits: Flags, among: Ints, result: Ints
) -> None:
    """Fill what was awaited, looking among some operations only."""
    work, lane = window.work, window.lane
    by_end = among[np.argsort(work.end[among], kind="stable")]
    at = np.searchsorted(work.end[by_end], work.begin[rows] + _CLOCK_NS, side="right") - 1
    for back in range(_TRIES):
        index = at - back
        candidate = by_end[np.maximum(index, 0)]
        fits = (index >= 0) & waits & (result < 0) & (lane[candidate] != lane[rows])
        fits &= work.begin[rows] - work.end[candidate] <= EVENT_LATENCY_NS
        fits &= pending.launch[candidate] < wait_at
        result[fits] = candidate[fits]


def causes_of_waits(
    window: Window, sides: Sides, pending: Pending, rows: Ints, waits: EventWaits
) -> tuple[Ints, Flags, Ints]:
    """Return the cause of each event wait, whether it is only likely, and the operation that is to blame.

    Args:
        window: The work.
        sides: Its sides.
        pending: Its facts.
        rows: The operations that waited.
        waits: The wait of each.
    """
    size = len(waits.call)
    cause = np.full(size, CODE["wide_dependency"], dtype=np.int64)
    likely = ~waits.named
    awaited = np.maximum(waits.awaited, 0)
    blame = waits.awaited.copy()
    joins = _after_last_node(window, waits.call)
    cause[joins], likely = CODE["backward_join"], likely & ~joins
    collective = (waits.awaited >= 0) & sides.communication[awaited]
    behind = pending.before[awaited]
    strays = _on_stray_stream(window, sides, rows) | _on_stray_stream(window, sides, awaited)
    cause[strays & (waits.awaited >= 0)] = CODE["accumulate_grad_stream"]
    likely = likely | strays
    queued = collective & _behind_a_longer_one(window, sides, pending, awaited, behind)
    cause[queued] = CODE["comm_order"]
    blame = np.where(queued, behind, blame)
    return cause, likely, blame


def _after_last_node(window: Window, call: Ints) -> Flags:
    """Return which wait calls came from autograd's thread within 20 us of its last node's end."""
    ops, calls = window.timeline.ops, window.timeline.calls
    if len(calls) == 0 or len(ops) == 0:
        return np.zeros(len(call), dtype=np.bool_)
    row = np.maximum(call, 0)
    nodes = np.flatnonzero(ops.backward & (ops.parent < 0))
    ends = np.sort(ops.end[nodes])
    at = np.searchsorted(ends, calls.begin[row], side="right") - 1
    near = (at >= 0) & (calls.begin[row] - ends[np.maximum(at, 0)] <= EVENT_LATENCY_NS) if len(ends) else at >= 0
    return np.asarray((call >= 0) & calls.engine[row] & (calls.op[row] < 0) & near)


def _on_stray_stream(window: Window, sides: Sides, rows: Ints) -> Flags:
    """Return which operations accumulate a gradient on a stream that is not where backward mainly works."""
    work, ops = window.work, window.timeline.ops
    result = np.zeros(len(rows), dtype=np.bool_)
    nodes = np.array([_ACCUMULATE in name for name in window.timeline.names] or [False])
    if not work.backward.any() or not nodes.any() or len(ops) == 0:
        return result
    op = work.op[rows]
    inside = (op >= 0) & under(nodes[ops.name], ops.parent)[np.maximum(op, 0)]
    time = (work.end - work.begin).astype(np.float64) * work.backward
    main = int(np.argmax(np.bincount(window.lane, weights=time)))
    # hooks launch collectives under that node, which are no accumulation
    return np.asarray(inside & (window.lane[rows] != main) & ~sides.communication[rows])


def _behind_a_longer_one(window: Window, sides: Sides, pending: Pending, awaited: Ints, behind: Ints) -> Flags:
    """Return which awaited collectives stood, issued, behind a longer one of their communicator."""
    work = window.work
    row = np.maximum(behind, 0)
    length, longer = work.end - work.begin, work.end[row] - work.begin[row]
    return np.asarray(
        (behind >= 0)
        & sides.communication[row]
        & (work.group[row] == work.group[awaited])
        & (work.begin[awaited] - work.end[row] <= EVENT_LATENCY_NS)
        & (pending.issued[awaited] < work.begin[row] + longer // 2)
        & (longer > 2 * length[awaited])
    )
