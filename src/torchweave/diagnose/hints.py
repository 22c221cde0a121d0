"""What a trace can only hint at: clocks read without a synchronization, and waits of a stream on itself."""

from __future__ import annotations

import re

import numpy as np

from torchweave.diagnose.calls import names_matching
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window, launch_begin, launch_thread

_CLOCK = re.compile(r"^<built-in (?:function|method) (?:time|perf_counter|monotonic|process_time)(?:_ns)?\b")
# the device has to have worked on for longer than the host measured, and for so long
_LEAST_NS = 1_000_000
_POLLING_NS = 50_000


def hints(window: Window, _: Sides) -> tuple[str, ...]:
    """Return hints as sentences; none of them is proven by a trace."""
    # a watched run shows both, and need not guess
    return () if window.timeline.log is not None else (*_clocks(window), *_own_waits(window))


def _clocks(window: Window) -> tuple[str, ...]:
    """Two reads of a host clock with launches between them, and the launched work running on after the second."""
    timeline, work = window.timeline, window.work
    frames = timeline.frames
    reads = np.flatnonzero(names_matching(timeline, _CLOCK)[frames.name]) if len(frames) else np.zeros(0, np.int64)
    launch, thread = launch_begin(timeline, work), launch_thread(timeline, work)
    worst = (0, 0.0)
    for code in np.unique(frames.thread[reads]).tolist():
        at = frames.begin[reads[frames.thread[reads] == code]]
        order = np.argsort(launch[thread == code], kind="stable")
        mine, ends = launch[thread == code][order], work.end[thread == code][order]
        if len(at) < 2 or len(mine) == 0:
            continue
        low, high = np.searchsorted(mine, at[:-1]), np.searchsorted(mine, at[1:])
        last = np.maximum.accumulate(ends)[np.maximum(high - 1, 0)]
        on = np.where(high > low, last - at[1:], 0)
        measured = at[1:] - at[:-1]
        on[on < np.maximum(measured, _LEAST_NS)] = 0
        # a loop that polls the clock measures nothing of what lies between two of its passes
        apart = np.concatenate(([True], measured > _POLLING_NS, [True]))
        on[~(apart[:-2] & apart[2:])] = 0
        best = int(np.argmax(on))
        if on[best] > worst[0]:
            worst = (int(on[best]), float(measured[best]))
    if worst[0] == 0:
        return ()
    text = (
        f"timed_without_sync (likely): a host clock was read {worst[1] / 1e6:.3f} ms after another, and the work "
        f"launched between the two ran on for {worst[0] / 1e6:.3f} ms (see `torchweave explain timed_without_sync`)."
    )
    return (text,)


def _own_waits(window: Window) -> tuple[str, ...]:
    waits = window.timeline.waits
    number = int(((waits.on_stream >= 0) & (waits.on_stream == waits.stream)).sum())
    if number == 0:
        return ()
    text = (
        f"missing_wait (likely): {number} waits of a stream are on an event of the same stream, and protect nothing "
        "(see `torchweave explain missing_wait`)."
    )
    return (text,)
