"""Stream objects of a watched run: which one an operation was sent by, and which of them are one CUDA stream."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.model import Where
from torchweave.diagnose.window import Window, launch_begin, launch_thread
from torchweave.trace.timeline import Ints, Timeline


def objects_of(window: Window) -> Ints:
    """Return the stream object that was current at each operation's launch, row of `Log.streams`, -1 for none."""
    timeline, work = window.timeline, window.work
    result = np.full(len(work), -1, dtype=np.int64)
    if timeline.log is None:
        return result
    uses = timeline.log.uses
    at, stream = np.array(uses.at, dtype=np.int64), np.array(uses.stream, dtype=np.int64)
    number = np.array(uses.thread, dtype=np.int64)
    launch, thread = launch_begin(timeline, work), launch_thread(timeline, work)
    for code in np.unique(thread[thread >= 0]).tolist():
        of = np.flatnonzero(number.astype(str) == timeline.threads[code])
        mine = np.flatnonzero(thread == code)
        last = np.searchsorted(at[of], launch[mine], side="right") - 1
        known = last >= 0
        result[mine[known]] = stream[of[last[known]]]
    return result


def aliases(timeline: Timeline, stream: int) -> tuple[int, ...]:
    """Return the stream objects (rows of `Log.streams`) that were used and are the same CUDA stream.

    Args:
        timeline: The trace.
        stream: The recorder's number of the stream.
    """
    if timeline.log is None:
        return ()
    pointers = {pointer for pointer, number in timeline.streams.items() if number == stream}
    used = set(timeline.log.uses.stream)
    made = timeline.log.streams.pointer
    return tuple(row for row, pointer in enumerate(made) if pointer in pointers and row in used)


def alias_place(timeline: Timeline, stream: int) -> Where:
    """Return where the second of the stream objects that are one CUDA stream was made."""
    rows = aliases(timeline, stream)
    log = timeline.log
    place = log.place(log.streams.place[rows[1]]) if log is not None and len(rows) > 1 else None
    return Where() if place is None else Where(file=place[0], line=place[1], function="Stream", caller=place[2])
