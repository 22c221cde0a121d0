"""Both sides on one stream, and what put them there."""

from __future__ import annotations

import re

import numpy as np

from torchweave.diagnose.calls import WAIT_EVENT, names_matching
from torchweave.diagnose.causes import CODE
from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE
from torchweave.diagnose.objects import aliases
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window

_REPLAY = re.compile(r"^(?:cuda|hip|cu)GraphLaunch")
# work beside the common stream up to this share is a first gradient, a flag
_ELSEWHERE = 0.05


def share_one_stream(window: Window, sides: Sides) -> bool:
    """Return whether both sides did nearly all their work on the same stream."""
    main = [_main_lane(window, sides, side) for side in (FIRST_SIDE, SECOND_SIDE)]
    return main[0][0] == main[1][0] and min(main[0][1], main[1][1]) >= 1 - _ELSEWHERE


def _main_lane(window: Window, sides: Sides, side: int) -> tuple[int, float]:
    """Return the lane with most of a side's time, and its share of it."""
    mine = sides.side == side
    time = (window.work.end - window.work.begin)[mine].astype(np.float64)
    per_lane = np.bincount(window.lane[mine], weights=time, minlength=len(window.lanes))
    best = int(np.argmax(per_lane))
    return best, float(per_lane[best] / max(per_lane.sum(), 1.0))


def cause_of_sharing(window: Window, sides: Sides) -> int:
    """Return the code of what put both sides on one stream.

    `backward()` called under another stream shows in the trace: autograd's first node runs on its forward's stream
    and has to wait for the stream that was current at the call, and the first gradient is filled there.
    """
    if _replayed(window):
        return CODE["graph_one_branch"]
    if sides.found.names == ("forward", "backward") and (
        _first_node_waits(window) or _first_gradient_elsewhere(window)
    ):
        return CODE["backward_on_forward_stream"]
    main = window.lanes[_main_lane(window, sides, FIRST_SIDE)[0]]
    if len(aliases(window.timeline, main[1])) > 1:
        return CODE["stream_alias"]
    return CODE["same_stream"]


def _replayed(window: Window) -> bool:
    """Return whether nearly all the work was launched by replays of CUDA graphs: a graph decides on its branches."""
    calls, work = window.timeline.calls, window.work
    known = work.call >= 0
    if not known.any():
        return False
    replays = names_matching(window.timeline, _REPLAY)[calls.name]
    return bool(replays[work.call[known]].mean() > 0.9)


def _first_node_waits(window: Window) -> bool:
    """Return whether a first node of a backward waits for an event: it would not on the caller's own stream."""
    calls, ops = window.timeline.calls, window.timeline.ops
    rows = np.flatnonzero(names_matching(window.timeline, WAIT_EVENT)[calls.name] & (calls.op >= 0))
    rows = rows[ops.backward[calls.op[rows]]] if len(ops) else rows[:0]
    nodes = np.flatnonzero(ops.backward & (ops.parent < 0))
    nodes = nodes[np.lexsort((ops.begin[nodes], ops.thread[nodes]))]
    if len(rows) == 0 or len(nodes) == 0:
        return False
    previous = np.concatenate(([np.iinfo(np.int64).min // 2], ops.end[nodes][:-1]))
    new_thread = np.concatenate(([True], ops.thread[nodes][1:] != ops.thread[nodes][:-1]))
    # a pause of the engine, or its thread's beginning, is where a backward begins
    first = nodes[new_thread | (ops.begin[nodes] - previous > 100_000)]
    return bool(np.isin(calls.op[rows], first).any())


def _first_gradient_elsewhere(window: Window) -> bool:
    """Return whether the gradient that backward begins with was filled on a stream that did little else."""
    work, ops, names = window.work, window.timeline.ops, window.timeline.names
    seeds = np.array([name in ("aten::ones_like", "aten::full_like") for name in names] or [False])
    rows = np.flatnonzero((work.op >= 0) & ~work.backward)
    for row in rows.tolist():
        op = int(work.op[row])
        while op >= 0 and not seeds[ops.name[op]]:
            op = int(ops.parent[op])
        if (
            op >= 0
            and (window.lane == window.lane[row]).sum() <= 2
            and not work.backward[window.lane == window.lane[row]].any()
        ):
            return True
    return False
