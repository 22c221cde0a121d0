"""The part of a trace that is looked at: its device work, cut to a window of time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torchweave.errors import UsageError
from torchweave.intervals import Intervals, union
from torchweave.trace.timeline import Flags, Ints, Timeline, Work


@dataclass(frozen=True, slots=True)
class Window:
    """The work of a window.

    Attributes:
        timeline: The whole trace.
        work: Device work in the window, cut to it, sorted by begin.
        rows: Which rows of the timeline's work these are.
        lane: For each operation, the row of its stream in `lanes`.
        lanes: (device, stream) of each lane, sorted.
        begin: First start, ns.
        end: Last end, ns.
    """

    timeline: Timeline
    work: Work
    rows: Ints
    lane: Ints
    lanes: tuple[tuple[int, int], ...]
    begin: int
    end: int

    def busy(self, mask: Flags | None = None) -> Intervals:
        """Return the union of the operations that a mask selects, all by default."""
        work = self.work
        if mask is None:
            return union(np.column_stack((work.begin, work.end)))
        return union(np.column_stack((work.begin[mask], work.end[mask])))


def look_at(
    timeline: Timeline, *, window_ms: tuple[float, float] | None = None, range_name: str | None = None
) -> Window:
    """Choose the work to look at.

    Args:
        timeline: The trace.
        window_ms: Begin and end, ms after the trace's first work; None for all.
        range_name: Only work launched inside user annotations of this name; None for all.

    Raises:
        UsageError: Nothing ran in the window, or no annotation has the name.
    """
    work = timeline.work
    begin, end = int(work.begin.min()), int(work.end.max())
    if window_ms is not None:
        begin, end = begin + round(window_ms[0] * 1e6), begin + round(window_ms[1] * 1e6)
    if range_name is not None:
        inside = in_range(timeline, work, range_name)
        if not inside.any():
            raise UsageError(
                "A range has to hold work",
                given=f"`{range_name}`: no work was launched inside it",
                remedy="choose an annotation around the launches, or `--window`",
            )
        begin = max(begin, int(work.begin[inside].min()))
        end = min(end, int(work.end[inside].max()))
    # an operation without length lies in a window too
    keep = (work.begin < end) & (work.end > begin) | (work.begin >= begin) & (work.end <= end)
    if not keep.any():
        length_ms = (int(work.end.max()) - int(work.begin.min())) / 1e6
        raise UsageError(
            "A window has to hold work",
            given=f"nothing ran in it; the trace has {length_ms:.3f} ms of device work",
            remedy=f"choose times within 0..{length_ms:.3f}",
        )
    kept = take(work, keep)
    kept = replace(kept, begin=np.maximum(kept.begin, begin), end=np.minimum(kept.end, end))
    # operations without length, as old traces round them, neither begin nor end a span
    shown = kept.end > kept.begin
    shown = shown if shown.any() else np.ones(len(kept), dtype=np.bool_)
    pairs, lane = np.unique(np.column_stack((kept.device, kept.stream)), axis=0, return_inverse=True)
    return Window(
        timeline=timeline,
        work=kept,
        rows=np.flatnonzero(keep),
        lane=lane.reshape(-1).astype(np.int64),
        lanes=tuple((int(device), int(stream)) for device, stream in pairs),
        begin=int(kept.begin[shown].min()),
        end=int(kept.end[shown].max()),
    )


def take(work: Work, keep: Flags) -> Work:
    """Return the operations that a mask selects."""
    if keep.all():
        return work
    return Work(**{name: getattr(work, name)[keep] for name in Work.__slots__})


def launch_begin(timeline: Timeline, work: Work) -> Ints:
    """Return when each operation's launch call began, its own begin where that was not recorded."""
    calls = timeline.calls
    return np.where(work.call >= 0, calls.begin[work.call], work.begin) if len(calls) else work.begin


def launch_thread(timeline: Timeline, work: Work) -> Ints:
    """Return the thread of each operation's launch call, -1 where that was not recorded."""
    calls = timeline.calls
    return np.where(work.call >= 0, calls.thread[work.call], -1) if len(calls) else np.full(len(work), -1)


def in_range(timeline: Timeline, work: Work, name: str) -> Flags:
    """Return which operations were launched inside user annotations of a name.

    Autograd's threads carry no annotations of their own: what they launch meanwhile counts too.

    Raises:
        UsageError: No annotation has the name.
    """
    notes = timeline.annotations
    wanted = np.array([text == name for text in timeline.names] or [False])[notes.name]
    if not wanted.any():
        known = sorted({timeline.names[code] for code in np.unique(notes.name)})
        raise UsageError(
            "A range has to be a user annotation of the trace",
            given=f"`{name}`",
            remedy=f"choose one of: {', '.join(known[:20])}"
            if known
            else "record with `torch.profiler.record_function(NAME)` around the work (this trace has no annotations)",
        )
    at, thread = launch_begin(timeline, work), launch_thread(timeline, work)
    result = np.zeros(len(work), dtype=np.bool_)
    for code in np.unique(notes.thread[wanted]):
        mine = wanted & (notes.thread == code)
        times = union(np.column_stack((notes.begin[mine], notes.end[mine])))
        row = np.searchsorted(times[:, 0], at, side="right") - 1
        inside = (row >= 0) & (at < times[np.maximum(row, 0), 1])
        result |= inside & ((thread == code) | work.backward)
    return result
