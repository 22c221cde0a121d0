"""The clocks of the ranks of one job, aligned by their collectives, and who came last to each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchweave.diagnose.peers import NOT_LATE
from torchweave.trace.timeline import Flags, Ints, Timeline

# Two traces of one job can begin at different collectives: at most so many are tried as the common first.
_MOST_SHIFT = 64
# An earlier start than the last rank's by less than this is no waiting: clocks, launch order.
_TOLERANCE_NS = 50_000


@dataclass(frozen=True, slots=True)
class Meetings:
    """The collectives that several ranks took part in, all on the first rank's clock.

    Attributes:
        num_matched: How many there are.
        offset_ns: For each rank, what to add to its own absolute times.
        spread_us: How far the ends of one collective lie apart after aligning, us, at the median.
        late_until: For each rank and each operation of its trace, until when it waited for its last peer, on the
            trace's own clock, or `NOT_LATE`.
        last: For each rank, to how many collectives it came last, late enough to matter.
        waited_ms: For each rank, how long it waited for others in all.
        kept_ms: For each rank, how long the others waited for it, the longest wait of each collective.
    """

    num_matched: int
    offset_ns: tuple[int, ...]
    spread_us: float
    late_until: tuple[Ints, ...]
    last: tuple[int, ...]
    waited_ms: tuple[float, ...]
    kept_ms: tuple[float, ...]


def meet(timelines: Sequence[Timeline]) -> Meetings:
    """Align the clocks of ranks, and find who waited for whom.

    A collective ends on all its ranks at nearly the same time, whenever they came: the ends align the clocks.

    Args:
        timelines: The traces of one job, in the order of their ranks.
    """
    lists = [_collectives(timeline) for timeline in timelines]
    late = [np.full(len(timeline.work), NOT_LATE, dtype=np.int64) for timeline in timelines]
    rows, begins, ends = _match(timelines, lists)
    num_ranks = len(timelines)
    present = rows >= 0
    offset = _offsets(ends, present)
    begins, ends = begins + offset, ends + offset
    common = present.sum(axis=1) > 1
    rows, begins, ends, present = rows[common], begins[common], ends[common], present[common]
    came = np.where(present, begins, np.iinfo(np.int64).min)
    last = came.max(axis=1) if len(came) else np.zeros(0, dtype=np.int64)
    waited = np.where(present, np.clip(last[:, None] - begins, 0, None), 0)
    waited = np.minimum(waited, np.where(present, ends - begins, 0))
    waited[waited < _TOLERANCE_NS] = 0
    for rank, timeline in enumerate(timelines):
        mine = present[:, rank] & (waited[:, rank] > 0)
        at = rows[mine, rank]
        late[rank][at] = timeline.work.begin[at] + waited[mine, rank]
    longest = waited.max(axis=1, initial=0)
    is_last = came == last[:, None]
    mattered = is_last & (longest[:, None] > 0)
    spread = [np.ptp(row[here]) for row, here in zip(ends, present, strict=True)]
    return Meetings(
        num_matched=int(common.sum()),
        offset_ns=tuple(int(value) for value in offset[0]) if num_ranks else (),
        spread_us=float(np.median(spread)) / 1e3 if spread else 0.0,
        late_until=tuple(late),
        last=tuple(int(value) for value in mattered.sum(axis=0)),
        waited_ms=tuple(float(value) / 1e6 for value in waited.sum(axis=0)),
        kept_ms=tuple(float(value) / 1e6 for value in np.where(mattered, longest[:, None], 0).sum(axis=0)),
    )


def _collectives(timeline: Timeline) -> dict[tuple[str, str, int], Ints]:
    """Return the rows of a rank's collectives, by group, name and size, in the order of their start."""
    work = timeline.work
    rows = np.flatnonzero(work.collective >= 0)
    result: dict[tuple[str, str, int], list[int]] = {}
    for row in rows.tolist():
        group = timeline.names[work.group[row]] if work.group[row] >= 0 else ""
        key = (group, timeline.names[work.collective[row]], int(work.elements[row]))
        result.setdefault(key, []).append(row)
    return {key: np.array(value, dtype=np.int64) for key, value in result.items()}


def _match(timelines: Sequence[Timeline], lists: Sequence[dict[tuple[str, str, int], Ints]]) -> tuple[Ints, Ints, Ints]:
    """Return, for each collective (row) and rank (column), its row in the trace or -1, its begin and its end."""
    tables = []
    for key in sorted({key for each in lists for key in each}):
        columns = [each.get(key, np.zeros(0, dtype=np.int64)) for each in lists]
        here = [rank for rank, column in enumerate(columns) if len(column)]
        first = here[0]
        shifts = {rank: _shift(timelines[first], columns[first], timelines[rank], columns[rank]) for rank in here}
        low, high = min(shifts.values()), max(shifts[rank] + len(columns[rank]) for rank in here)
        table = np.full((high - low, len(timelines)), -1, dtype=np.int64)
        for rank in here:
            begin = shifts[rank] - low
            table[begin : begin + len(columns[rank]), rank] = columns[rank]
        tables.append(table)
    rows = np.concatenate(tables) if tables else np.zeros((0, len(timelines)), dtype=np.int64)
    begins, ends = np.zeros_like(rows), np.zeros_like(rows)
    for rank, timeline in enumerate(timelines):
        here_rows = rows[:, rank] >= 0
        at = rows[here_rows, rank]
        zero = timeline.origin_ns - timelines[0].origin_ns
        begins[here_rows, rank] = timeline.work.begin[at] + zero
        ends[here_rows, rank] = timeline.work.end[at] + zero
    return rows, begins, ends


def _shift(one: Timeline, rows: Ints, other: Timeline, other_rows: Ints) -> int:
    """Return which collective of the first rank the other's first one is: 0 unless the traces begin apart."""
    if len(rows) == len(other_rows):
        return 0
    a, b = one.work.end[rows], other.work.end[other_rows]
    best, best_spread = 0, np.inf
    for shift in range(-min(_MOST_SHIFT, len(b) - 1), min(_MOST_SHIFT, len(a) - 1) + 1):
        left, right = a[max(shift, 0) :], b[max(-shift, 0) :]
        size = min(len(left), len(right))
        if size < min(len(a), len(b), 3):
            continue
        # the right pairing leaves one constant between the clocks
        difference = left[:size] - right[:size]
        spread = float(np.median(np.abs(difference - np.median(difference)))) / size
        if spread < best_spread:
            best, best_spread = shift, spread
    return best


def _offsets(ends: Ints, present: Flags) -> Ints:
    """Return what to add to each rank's times, shape (1, ranks): the median difference of the ends."""
    num_ranks = ends.shape[1]
    offset = np.zeros((1, num_ranks), dtype=np.int64)
    known = {0}
    # a rank that shares no collective with the first is aligned through one that does
    for _ in range(num_ranks):
        for rank in set(range(num_ranks)) - known:
            for base in sorted(known):
                both = present[:, rank] & present[:, base]
                if both.any():
                    offset[0, rank] = offset[0, base] + int(np.median(ends[both, base] - ends[both, rank]))
                    known.add(rank)
                    break
    return offset
