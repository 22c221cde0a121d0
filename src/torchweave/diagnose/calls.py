"""What each runtime call did to the host: waited, copied, allocated, or blocked in a launch. One cause a call."""

from __future__ import annotations

import re

import numpy as np

from torchweave.diagnose.causes import CODE
from torchweave.trace.timeline import COPY, DEVICE_TO_HOST, KERNEL, ON_DEVICE, Calls, Flags, Ints, Ops, Timeline

NO_CAUSE = -1

_SYNC = re.compile(r"^(?:cuda|hip)(?:Device|Stream|Event)Synchronize|^cu(?:Ctx|Stream|Event)Synchronize")
_COPY = re.compile(r"^(?:cuda|hip)Memcpy|^cuMemcpy")
_BLOCKING_COPY = re.compile(r"^(?:cuda|hip)Memcpy(?:2D|3D|ToSymbol|FromSymbol|DtoH|HtoD|WithStream)?(?:_ptds|_v\d+)?$")
_DEVICE_ALLOC = re.compile(
    r"^(?:cuda|hip)(?:Malloc|Free)(?:Pitch|3D|Array|Managed)?(?:_v\d+)?$|^cuMem(?:Alloc|Free)(?!Host|Async)|"
    r"^(?:cu|hip)Mem(?:Create|Map|Unmap|Release|SetAccess|AddressReserve|AddressFree)"
)
_PINNED_ALLOC = re.compile(
    r"^(?:cuda|hip)(?:HostAlloc|MallocHost|FreeHost|HostRegister|HostUnregister|HostMalloc|HostFree)|"
    r"^cuMem(?:HostAlloc|AllocHost|FreeHost|HostRegister|HostUnregister)"
)
WAIT_EVENT = re.compile(r"^(?:cuda|hip|cu)StreamWaitEvent")
_COPY_OP = re.compile(r"^aten::(?:copy_|_copy_from)|^Memcpy")

# A kernel this long cannot end inside its own launch call unless the call waits for it.
_LONG_KERNEL_NS = 20_000
_CLOCK_NS = 1_000
# a launch call this long, and so many times the usual, with so many operations waiting, was stuck in a full queue
_SLOW_LAUNCH_NS, _TIMES_USUAL, _MANY_WAITING = 15_000, 3, 250
# what a read of one number copies, at most
_SCALAR_BYTES = 64


def names_matching(timeline: Timeline, pattern: re.Pattern[str]) -> Flags:
    """Return, for each name of the trace, whether a pattern matches it."""
    return np.array([pattern.search(name) is not None for name in timeline.names] or [False])


def causes_of_calls(timeline: Timeline) -> Ints:
    """Return, for each call, the code of the cause that its time is charged to, NO_CAUSE for ordinary ones."""
    calls = timeline.calls
    result = np.full(len(calls), NO_CAUSE, dtype=np.int64)
    if len(calls) == 0:
        return result
    result[names_matching(timeline, _DEVICE_ALLOC)[calls.name]] = CODE["device_alloc"]
    result[names_matching(timeline, _PINNED_ALLOC)[calls.name]] = CODE["pinned_alloc"]
    result[_stuck_launches(timeline)] = CODE["launch_queue_full"]
    result[_launches_that_wait(timeline)] = CODE["launch_blocking"]
    sync = names_matching(timeline, _SYNC)[calls.name]
    _charge_copies(timeline, sync, result)
    _charge_syncs(timeline, np.flatnonzero(sync), result)
    return result


def guessed_causes(timeline: Timeline, of_call: Ints) -> Flags:
    """Return which calls' causes are guessed: without operators, what a synchronization after a copy was for."""
    if len(timeline.ops):
        return np.zeros(len(of_call), dtype=np.bool_)
    sync = names_matching(timeline, _SYNC)[timeline.calls.name]
    return np.asarray(sync & np.isin(of_call, [CODE["host_sync"], CODE["blocking_copy"]]))


def _charge_syncs(timeline: Timeline, rows: Ints, result: Ints) -> None:
    """A synchronization is its operator's: a copy's, a reading one's, or nobody's."""
    reading, copying = _operators(timeline, rows)
    result[rows] = CODE["explicit_sync"]
    result[rows[reading]] = CODE["host_sync"]
    result[rows[copying]] = CODE["blocking_copy"]
    if len(timeline.ops) == 0:
        _guess_reads(timeline, rows, result)


def _operators(timeline: Timeline, rows: Ints) -> tuple[Flags, Flags]:
    """Return which calls lie in an operator that computes and reads, and which in one that copies."""
    calls, ops = timeline.calls, timeline.ops
    if len(ops) == 0:
        return np.zeros(len(rows), dtype=np.bool_), np.zeros(len(rows), dtype=np.bool_)
    inside = calls.op[rows] >= 0
    innermost = ops.name[np.maximum(calls.op[rows], 0)]
    copying = inside & names_matching(timeline, _COPY_OP)[innermost]
    computes = np.array([_is_operator(name) for name in timeline.names] or [False])
    return np.asarray(inside & computes[innermost] & ~copying), np.asarray(copying)


def _guess_reads(timeline: Timeline, rows: Ints, result: Ints) -> None:
    """Without any operators: a synchronization right after a download is for the sake of what was downloaded."""
    work, calls = timeline.work, timeline.calls
    copies = np.flatnonzero((work.call >= 0) & (work.direction == DEVICE_TO_HOST))
    after = _next_on_thread(calls)[work.call[copies]]
    syncs = np.isin(after, rows)
    small = work.num_bytes[copies] <= _SCALAR_BYTES
    result[after[syncs & small]] = CODE["host_sync"]
    result[after[syncs & ~small]] = CODE["blocking_copy"]


def _is_operator(name: str) -> bool:
    """Return whether a name is an operator's that computes: not a collective's, not autograd's frame around one."""
    return "::" in name and not name.startswith(("autograd::", "c10d::", "torch::autograd", "nccl:"))


def _charge_copies(timeline: Timeline, sync: Flags, result: Ints) -> None:
    """A copy that holds the host: blocking where it waits for its end, pageable where the staging holds it."""
    calls, work = timeline.calls, timeline.work
    is_copy = names_matching(timeline, _COPY)[calls.name]
    result[names_matching(timeline, _BLOCKING_COPY)[calls.name]] = CODE["blocking_copy"]
    waiting = _copies_waited_for(timeline)
    result[waiting[is_copy[waiting]]] = CODE["blocking_copy"]
    joined = np.flatnonzero((work.call >= 0) & (work.kind == COPY) & work.pageable)
    rows = np.unique(work.call[joined])
    rows = rows[is_copy[rows]]
    result[rows] = CODE["pageable_copy"]
    follower = _next_on_thread(calls)
    after = follower[rows]
    same_op = (after >= 0) & (calls.op[np.maximum(after, 0)] == calls.op[rows]) & (calls.op[rows] >= 0)
    result[rows[same_op & sync[np.maximum(after, 0)]]] = CODE["blocking_copy"]
    # old versions read a number through memory that is not pinned: the operator's doing, not the copy's
    blocking = np.flatnonzero((result == CODE["blocking_copy"]) | (result == CODE["pageable_copy"]))
    reading, _ = _operators(timeline, blocking)
    result[blocking[reading & (_directions(timeline, blocking) == DEVICE_TO_HOST)]] = CODE["host_sync"]


def _copies_waited_for(timeline: Timeline) -> Ints:
    """Return the calls that last until their own copy ends, whatever the copy is called."""
    work, calls = timeline.work, timeline.calls
    rows = np.flatnonzero((work.call >= 0) & (work.kind == COPY) & (work.direction != ON_DEVICE))
    call, length = work.call[rows], work.end[rows] - work.begin[rows]
    lasts = (calls.end[call] >= work.end[rows] - _CLOCK_NS) & (calls.end[call] - calls.begin[call] >= 0.9 * length)
    return np.unique(call[lasts & (length >= _LONG_KERNEL_NS)])


def _directions(timeline: Timeline, rows: Ints) -> Ints:
    """Return the direction of the copy that each call launched, -1 for none."""
    work = timeline.work
    by_call = np.full(len(timeline.calls), -1, dtype=np.int64)
    joined = work.call >= 0
    by_call[work.call[joined]] = work.direction[joined]
    return by_call[rows]


def _next_on_thread(calls: Calls) -> Ints:
    """Return the next call on each call's thread, -1 for the last."""
    order = np.lexsort((calls.begin, calls.thread))
    result = np.full(len(calls), -1, dtype=np.int64)
    same = calls.thread[order[1:]] == calls.thread[order[:-1]]
    result[order[:-1][same]] = order[1:][same]
    return result


def _launches_that_wait(timeline: Timeline) -> Ints:
    """Return the launch calls that last until their kernel ends, as under CUDA_LAUNCH_BLOCKING=1."""
    work, calls = timeline.work, timeline.calls
    rows = np.flatnonzero((work.call >= 0) & (work.kind == KERNEL))
    call = work.call[rows]
    waits = calls.end[call] >= work.end[rows] - _CLOCK_NS
    length = work.end[rows] - work.begin[rows]
    # with clocks that disagree a kernel can seem to end early: the call must also have lasted as long
    waits &= calls.end[call] - calls.begin[call] >= 0.9 * length
    long = length >= _LONG_KERNEL_NS
    proven = waits & long
    # short kernels prove nothing alone; where nearly all long ones are waited for, so are they
    if proven.sum() >= 0.8 * max(int(long.sum()), 1) and proven.any():
        return np.unique(call[waits])
    return np.unique(call[proven])


def _stuck_launches(timeline: Timeline) -> Ints:
    """Return launch calls that lasted far longer than others, with hundreds of operations waiting on their stream.

    Events take places in the queue too, so the operations alone can be fewer than its length.
    """
    work, calls = timeline.work, timeline.calls
    rows = np.flatnonzero(work.call >= 0)
    if len(rows) < _MANY_WAITING:
        return rows[:0]
    call = work.call[rows]
    took = calls.end[call] - calls.begin[call]
    slow = took > max(_SLOW_LAUNCH_NS, _TIMES_USUAL * float(np.median(took)))
    waiting = np.zeros(len(rows), dtype=np.int64)
    lane = work.device[rows] * (1 << 32) + work.stream[rows]
    for value in np.unique(lane[slow]).tolist():
        mine = np.flatnonzero(lane == value)
        issued, ended = np.sort(calls.begin[call[mine]]), np.sort(work.end[rows[mine]])
        at = calls.begin[call[mine]]
        waiting[mine] = np.searchsorted(issued, at) - np.searchsorted(ended, at)
    return np.unique(call[slow & (waiting >= _MANY_WAITING)])


def outer_operator(timeline: Timeline, op: int) -> str | None:
    """Return the name of the outermost operator around one, autograd's own frame left out."""
    ops: Ops = timeline.ops
    best = None
    while op >= 0:
        name = timeline.names[ops.name[op]]
        if not name.startswith("autograd::engine") or best is None:
            best = name
        op = int(ops.parent[op])
    return best
