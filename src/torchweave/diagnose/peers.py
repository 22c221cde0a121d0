"""Collectives that waited for another rank, estimated from length and bytes where only one rank is known."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.window import Window
from torchweave.trace.timeline import Ints

# Slower than this over all its bytes, a collective was waiting: no link between GPUs in use is so slow.
_SLOWEST_BYTES_PER_NS = 20.0
# What a collective costs beside its bytes.
_START_NS = 100_000
# What one that was waiting is taken to have needed, where nothing of its like ran alone: a common network link.
_USUAL_BYTES_PER_NS = 50.0
# A collective that takes this much longer than its like in the same trace was waiting.
_TIMES_LONGER = 3
# "never": before any time of a trace, whose zero lies inside it
NOT_LATE = int(np.iinfo(np.int64).min) // 4


def estimate_late(window: Window) -> Ints:
    """Return, for each operation, until when it waited for a late peer, ns, NOT_LATE for all others.

    One rank alone cannot prove it: a collective is taken to have waited where it lasted three times longer than the
    shortest of its like (name, group, size), or longer than the slowest link would need for its bytes.
    """
    work = window.work
    result = np.full(len(work), NOT_LATE, dtype=np.int64)
    rows = np.flatnonzero((work.collective >= 0) & (work.elements > 0) & (work.element_bytes > 0))
    if len(rows) == 0:
        return result
    length = work.end[rows] - work.begin[rows]
    keys = np.column_stack((work.collective[rows], work.group[rows], work.elements[rows], work.element_bytes[rows]))
    _, like = np.unique(keys, axis=0, return_inverse=True)
    like = like.reshape(-1)
    shortest = np.full(int(like.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, like, length)
    size = work.elements[rows] * work.element_bytes[rows]
    slow = length > size / _SLOWEST_BYTES_PER_NS + _START_NS
    usual = (size / _USUAL_BYTES_PER_NS).astype(np.int64) + _START_NS
    needed = np.where(slow, np.minimum(usual, length), length)
    needed = np.where(length > _TIMES_LONGER * shortest[like], np.minimum(shortest[like], needed), needed)
    late = length > needed + _START_NS
    result[rows[late]] = work.end[rows[late]] - needed[late]
    return result
