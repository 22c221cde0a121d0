"""Where in the program a cause was charged: from calls, operators and Python frames."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from torchweave.diagnose.calls import outer_operator
from torchweave.diagnose.causes import CODE
from torchweave.diagnose.charges import Charges
from torchweave.diagnose.model import Place, Where
from torchweave.diagnose.pending import Pending
from torchweave.diagnose.window import Window
from torchweave.trace import link
from torchweave.trace.timeline import Ints, Spans, Timeline

# How many places of a cause are looked up, and how many dear moments are read for frames.
_MOST_PLACES, _MOST_MOMENTS = 5, 32

_FRAME = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.+)$")
_BUILT_IN = re.compile(r"^<built-in (?:method|function) (?P<name>[\w.]+)")
# wrappers between the user's call and what was meant by it
_WRAPPERS = frozenset({"wrapper", "inner", "decorate_context", "_call_impl", "_wrapped_call_impl", "_fn", "__call__"})
# frames of these are not the user's
_LIBRARY = re.compile(
    r"(?:^|/)torch/|site-packages/|dist-packages/|(?:^|/)lib/python3|(?:^|/)(?:threading|contextlib|runpy|functools)\.py$|"
    r"^<"
)


def places(window: Window, pending: Pending, found: Charges) -> tuple[Place, ...]:
    """Return the places that charges of one cause belong to, the dearest first.

    Args:
        window: The work.
        pending: Its facts.
        found: The charges of one cause.
    """
    if len(found) == 0:
        return ()
    call = _call_behind(window, found)
    time = (found.end - found.begin).astype(np.float64)
    elsewhere = found.cause[0] in (CODE["host_busy"], CODE["gil"])
    if elsewhere:
        # only frames that can hold such a moment are looked through: a trace can have millions
        window = replace(window, timeline=_with_long_frames(window.timeline, int(np.median(time)) // 2))
    key = _keys(window.timeline, call)
    values, group = np.unique(key, return_inverse=True)
    cost = np.bincount(group.reshape(-1), weights=time, minlength=len(values))
    result: dict[Where, Place] = {}
    for value in np.argsort(-cost)[:_MOST_PLACES].tolist():
        mine = np.flatnonzero(group.reshape(-1) == value)
        dear = mine[np.argsort(-time[mine], kind="stable")[: _MOST_MOMENTS if elsewhere else 1]]
        share = cost[value] / max(time[dear].sum(), 1.0)
        for row in dear.tolist():
            if elsewhere:
                where = _where_elsewhere(window, pending, found, row)
            else:
                where = _where_of_call(window, int(call[row]))
            count = len(mine) if len(dear) == 1 else 1
            known = result.get(where, Place(where, 0.0, 0))
            result[where] = replace(known, cost_ms=known.cost_ms + time[row] * share / 1e6, count=known.count + count)
    return tuple(sorted(result.values(), key=lambda place: -place.cost_ms))


def _with_long_frames(timeline: Timeline, shortest_ns: int) -> Timeline:
    frames = timeline.frames
    keep = frames.end - frames.begin >= shortest_ns
    return replace(timeline, frames=Spans(*(getattr(frames, name)[keep] for name in Spans.__slots__)))


def _call_behind(window: Window, found: Charges) -> Ints:
    """Return the call that stands for each charge: its own, else the launch of the operation that waited."""
    if found.cause[0] == CODE["backward_on_forward_stream"]:
        backward = np.flatnonzero(window.work.backward & (window.work.call >= 0))
        return np.full(len(found), window.work.call[backward[0]] if len(backward) else -1)
    return np.where(found.call >= 0, found.call, window.work.call[found.pending])


def _keys(timeline: Timeline, call: Ints) -> Ints:
    """Return one number for each (name of the call, name of the outermost operator around it)."""
    calls, ops = timeline.calls, timeline.ops
    if len(calls) == 0:
        return np.full(len(call), -1, dtype=np.int64)
    row = np.maximum(call, 0)
    top = link.outermost(calls.op[row], ops.parent) if len(ops) else np.full(len(row), -1)
    name = np.where(top >= 0, ops.name[np.maximum(top, 0)], -1) if len(ops) else top
    return np.where(call >= 0, calls.name[row] * (len(timeline.names) + 1) + name + 1, -1)


def _where_of_call(window: Window, call: int) -> Where:
    """Return the place of one call: the frames around it, its operator, its name."""
    timeline = window.timeline
    if call < 0:
        return Where()
    calls = timeline.calls
    op = int(calls.op[call])
    stack = frames_at(timeline, int(calls.thread[call]), int(calls.begin[call]))
    if calls.engine[call] and not any(map(_is_users, stack)):
        stack = _stack_of_backward(timeline, int(calls.begin[call])) or stack
    return _where(timeline, stack, op, timeline.names[calls.name[call]])


def _where_elsewhere(window: Window, pending: Pending, found: Charges, row: int) -> Where:
    """Return the place of a moment without calls: the innermost frame that holds nearly all of it."""
    timeline = window.timeline
    thread = int(pending.thread[found.pending[row]])
    begin, end = int(found.begin[row]), int(found.end[row])
    slack = (end - begin) // 20
    stack = frames_at(timeline, thread, begin + slack, end - slack)
    own = [parsed for name in stack if (parsed := _parse(name)) is not None]
    users = [frame for frame in own if not _LIBRARY.search(frame[0])]
    if not own:
        return Where()
    file, line, function = (users or own)[-1]
    return Where(file=file, line=line, function=function, caller=function)


def _stack_of_backward(timeline: Timeline, at: int) -> list[str]:
    """Return the frames of the thread that stands in `backward()`: autograd's own thread has none."""
    frames = timeline.frames
    running = (frames.begin <= at) & (frames.end >= at)
    for thread in np.unique(frames.thread[running]).tolist():
        stack = frames_at(timeline, thread, at)
        if any(_function(frame) in ("backward", "run_backward", "grad") for frame in stack):
            return stack
    return []


def frames_at(timeline: Timeline, thread: int, begin: int, end: int | None = None) -> list[str]:
    """Return the names of the Python frames that were running, the outermost first.

    Args:
        timeline: The trace.
        thread: Code of the thread.
        begin: The moment, ns.
        end: Until when they have to run; None for the moment alone.
    """
    frames = timeline.frames
    until = begin if end is None else end
    rows = np.flatnonzero((frames.thread == thread) & (frames.begin <= begin) & (frames.end >= until))
    rows = rows[np.lexsort((-frames.end[rows], frames.begin[rows]))]
    return [timeline.names[code] for code in frames.name[rows]]


def _where(timeline: Timeline, stack: list[str], op: int, call: str) -> Where:
    outer = outer_operator(timeline, op)
    at = next((i for i in range(len(stack) - 1, -1, -1) if _is_users(stack[i])), None)
    if at is None:
        function = next((name for frame in stack[::-1] if (name := _function(frame))), None)
        return Where(function=function, op=outer, call=call)
    file, line, caller = _parse(stack[at]) or (None, None, None)
    # what the user's own frame called: `item`, `synchronize`, `wait_stream`
    called = [name for frame in stack[at + 1 :] if (name := _function(frame)) and name not in _WRAPPERS]
    return Where(file, line, called[0] if called else caller, outer, call, caller)


def _is_users(frame: str) -> bool:
    parsed = _parse(frame)
    return parsed is not None and not _LIBRARY.search(parsed[0])


def _parse(frame: str) -> tuple[str, int, str] | None:
    match = _FRAME.match(frame)
    return (match["file"], int(match["line"]), match["function"]) if match else None


def _function(frame: str) -> str | None:
    """Return the name of the function of a frame, None for frames such as `nn.Module: Linear_0`."""
    parsed = _parse(frame)
    if parsed is not None:
        return parsed[2]
    match = _BUILT_IN.match(frame)
    return match["name"] if match else None
