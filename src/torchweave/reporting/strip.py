"""The lanes of a diagnosis drawn with characters, one line a stream, and a line that marks what was lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE, CauseFound, Diagnosis, Lane
from torchweave.intervals import Intervals

LEVELS = " ▁▂▃▄▅▆▇█"
ASCII_LEVELS = " .:-=+*##"
_MARKS = "abcdefghijklmnopqrstuvwxyz"
# more streams than a screen holds are not drawn, the busiest are
MOST_LANES = 12
# a lane with this share of the other side's time shows both
_GOOD_PART = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the strip.

    Attributes:
        label: What the line shows.
        text: Its characters.
        side: The side of most of it.
    """

    label: str
    text: str
    side: int


def strip(diagnosis: Diagnosis, width: int, *, levels: str = LEVELS) -> tuple[Row, ...]:
    """Draw the lanes.

    Args:
        diagnosis: The record.
        width: Columns for the whole window.
        levels: Characters from idle to busy.
    """
    span = max(round(diagnosis.numbers.span_ms * 1e6), 1)
    busiest = sorted(diagnosis.lanes, key=lambda lane: -int((lane.end - lane.begin).sum()))[:MOST_LANES]
    lanes = [lane for lane in diagnosis.lanes if any(lane is other for other in busiest)]
    rows = []
    for lane in lanes:
        share = shares(np.column_stack((lane.begin, lane.end)), span, width)
        text = "".join(levels[_level(value, len(levels))] for value in share)
        rows.append(Row(_label(lane, diagnosis), text, _main_side(lane)))
    if diagnosis.causes:
        rows.append(Row("lost or idle", _marks(diagnosis.causes, span, width), 0))
    return tuple(rows)


def shares(intervals: Intervals, span: int, width: int) -> npt.NDArray[np.float64]:
    """Return which share of each of `width` equal parts of a span the intervals cover, 0 to 1."""
    edges = np.linspace(0, span, width + 1)
    if len(intervals) == 0:
        return np.zeros(width)
    order = np.argsort(intervals[:, 0], kind="stable")
    begin, end = intervals[order, 0].astype(np.float64), np.maximum.accumulate(intervals[order, 1]).astype(np.float64)
    begin = np.maximum(begin, np.concatenate(([0.0], end[:-1])))
    end = np.maximum(end, begin)
    covered = np.concatenate(([0.0], np.cumsum(end - begin)))
    # covered time up to each edge: whole intervals before it, and a part of the one that it cuts
    at = np.searchsorted(begin, edges, side="right")
    before = covered[at] - np.maximum(0.0, np.where(at > 0, end[np.maximum(at - 1, 0)] - edges, 0.0))
    part: npt.NDArray[np.float64] = np.diff(before) / (span / width)
    return np.clip(part, 0.0, 1.0)


def _level(share: float, num_levels: int) -> int:
    # the least work shows, so that a lane of tiny kernels is not drawn empty
    return 0 if share <= 0 else max(1, round(share * (num_levels - 1)))


def _label(lane: Lane, diagnosis: Diagnosis) -> str:
    many = len({other.device for other in diagnosis.lanes}) > 1
    name = f"stream {lane.stream}" if not many else f"{lane.device}: stream {lane.stream}"
    side = _main_side(lane)
    names = diagnosis.sides.names
    kind = names[side - 1] if side and names and not names[side - 1].startswith("stream:") else ""
    return f"{name} {'both sides' if _holds_both(lane) else kind}".strip()


def mark(row: int) -> str:
    """Return the letter that a cause has wherever it is shown, "-" past the last letter."""
    return _MARKS[row] if row < len(_MARKS) else "-"


def _holds_both(lane: Lane) -> bool:
    """Return whether both sides did a good part of their work here: that is a finding, and not to be hidden."""
    first, second = _time_per_side(lane)
    return min(first, second) > _GOOD_PART * max(first, second)


def _main_side(lane: Lane) -> int:
    first, second = _time_per_side(lane)
    if max(first, second) <= 0:
        return 0
    return FIRST_SIDE if first >= second else SECOND_SIDE


def _time_per_side(lane: Lane) -> tuple[float, float]:
    time = (lane.end - lane.begin).astype(np.float64)
    return float(time[lane.side == FIRST_SIDE].sum()), float(time[lane.side == SECOND_SIDE].sum())


def _marks(causes: tuple[CauseFound, ...], span: int, width: int) -> str:
    """Return, for each column, the letter of the cause with most of it."""
    covers = [
        shares(np.concatenate((cause.lost_intervals, cause.idle_intervals)), span, width)
        for cause in causes[: len(_MARKS)]
    ]
    best = np.argmax(np.array(covers), axis=0)
    most = np.max(np.array(covers), axis=0)
    return "".join(mark(cause) if share >= 0.2 else " " for cause, share in zip(best, most, strict=True))
