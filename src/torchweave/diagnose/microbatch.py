"""Forward and backward of different microbatches: which work is which, and whether they depend on each other."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.window import Window, launch_begin
from torchweave.intervals import Intervals, union
from torchweave.trace import link
from torchweave.trace.timeline import Flags, Ints

# torch.optim's own annotations: `Optimizer.step#SGD.step`, `Optimizer.zero_grad#SGD.zero_grad`
_OPTIMIZER = "Optimizer."


def forward_work(window: Window) -> Flags:
    """Return the work of the model's operators outside autograd and outside the optimizer."""
    work = window.work
    times = _optimizer_times(window)
    at = launch_begin(window.timeline, work)
    row = np.searchsorted(times[:, 0], at, side="right") - 1
    optimizing = (row >= 0) & (at < times[np.maximum(row, 0), 1]) if len(times) else np.zeros(len(at), dtype=np.bool_)
    return np.asarray(~work.backward & (work.op >= 0) & ~optimizing)


def independent_backward(window: Window, forward: Flags) -> bool:
    """Return whether some backward has its forward before the trace, and a forward that does not wait for it.

    A step of the optimizer between the two makes the forward wait: then the trace begins in the middle of a step.

    Args:
        window: The work.
        forward: What `forward_work` returned.
    """
    orphans = _orphans(window)
    if len(orphans) == 0 or not forward.any():
        return False
    times = _optimizer_times(window)
    never = np.iinfo(np.int64).max
    since = np.concatenate(([-never], times[:, 1]))[np.searchsorted(times[:, 1], orphans, side="right")]
    until = np.append(times[:, 0], never)[np.searchsorted(times[:, 0], orphans, side="left")]
    launches = np.sort(launch_begin(window.timeline, window.work)[forward])
    return bool((np.searchsorted(launches, until) > np.searchsorted(launches, since)).any())


def _optimizer_times(window: Window) -> Intervals:
    notes = window.timeline.annotations
    wanted = np.array([name.startswith(_OPTIMIZER) for name in window.timeline.names] or [False])[notes.name]
    return union(np.column_stack((notes.begin[wanted], notes.end[wanted])))


def _orphans(window: Window) -> Ints:
    """Return the begins of backward nodes that launched work and whose forward is not in the trace before them."""
    ops, rows = window.timeline.ops, window.work.op
    top = np.unique(link.outermost(rows[(rows >= 0) & window.work.backward], ops.parent))
    nodes = top[ops.sequence[top] >= 0]
    forward = np.flatnonzero(~ops.backward & (ops.sequence >= 0))
    # the first forward operator with a node's sequence number: sorted by number, then by begin
    order = forward[np.lexsort((ops.begin[forward], ops.sequence[forward]))]
    at = np.searchsorted(ops.sequence[order], ops.sequence[nodes])
    found = at < len(order)
    first = order[np.minimum(at, len(order) - 1)] if len(order) else nodes
    known = found & (ops.sequence[first] == ops.sequence[nodes]) & (ops.begin[first] <= ops.begin[nodes])
    known &= len(order) > 0
    return np.asarray(ops.begin[nodes[~known]], dtype=np.int64)
