"""A whole diagnosis of one trace: sides, numbers, causes, lanes, and what the trace cannot tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchweave.diagnose.blame import blame
from torchweave.diagnose.causes import NAMES, cause
from torchweave.diagnose.charges import Charges
from torchweave.diagnose.facts import facts
from torchweave.diagnose.hints import hints
from torchweave.diagnose.live import look_live
from torchweave.diagnose.model import (
    CauseFound,
    Diagnosis,
    Lane,
    Numbers,
    Place,
    SidesFound,
    Verdict,
    Where,
)
from torchweave.diagnose.notes import not_known
from torchweave.diagnose.objects import alias_place
from torchweave.diagnose.overlap import OVERLAPPED_SHARE, communication_numbers, numbers, stream_numbers, verdict
from torchweave.diagnose.peers import estimate_late
from torchweave.diagnose.pending import Pending, read_pending
from torchweave.diagnose.places import places
from torchweave.diagnose.scale import lost_cost
from torchweave.diagnose.sides import Sides, choose_sides
from torchweave.diagnose.stretch import remarks
from torchweave.diagnose.window import Window, look_at
from torchweave.intervals import union
from torchweave.trace.timeline import Flags, Ints, Timeline

# less than this is nothing in a report
_LEAST_MS = 0.0005
# what stands before all that costs time: the verdict's word, and its sentence
_FIRST: dict[str, tuple[Verdict, str]] = {
    "missing_wait": ("race", "A race: memory crosses streams with nothing that orders its uses."),
    "timed_without_sync": ("mistimed", "Mistimed: a host clock was read while the device still worked."),
}


def diagnose(
    timeline: Timeline,
    *,
    between: Sequence[str] | None = None,
    window_ms: tuple[float, float] | None = None,
    range_name: str | None = None,
    late_until: Ints | None = None,
    late_known: Flags | None = None,
) -> Diagnosis:
    """Say how much of a trace overlapped, how much could have, and what kept the rest apart.

    Args:
        timeline: The trace.
        between: The two sides, in words; None chooses them by the rules.
        window_ms: Begin and end of the time to look at, ms after the first work; None for all.
        range_name: Look only at what was launched inside user annotations of this name.
        late_until: For each operation of the trace, until when it waited for a late peer, ns, or `NOT_LATE`, as the
            other ranks' traces show; None estimates it.
        late_known: For which operations the other ranks' traces show it; what they do not hold is estimated.

    Returns:
        The frozen record that the reports are made from.

    Raises:
        UsageError: The sides, the window or the range select nothing.
    """
    window = look_at(timeline, window_ms=window_ms, range_name=range_name)
    sides = choose_sides(window, between)
    streams = stream_numbers(window)
    found = numbers(window, sides, streams)
    word = verdict(found, sides)
    causes: tuple[CauseFound, ...] = ()
    if word in ("partial", "serial"):
        late, known = estimate_late(window), np.zeros(len(window.work), dtype=np.bool_)
        if late_until is not None:
            known = known | True if late_known is None else late_known[window.rows]
            late = np.where(known, late_until[window.rows], late)
        causes = _causes(window, sides, blame(window, sides, late, late_is_known=known))
        if not causes:
            # one side had nothing left to come whenever the other ran
            word = "nothing_to_overlap"
    device = timeline.devices.get(window.lanes[0][0])
    live = look_live(window)
    first = [_FIRST[item.cause] for item in live.causes]
    return Diagnosis(
        file=timeline.file,
        rank=timeline.rank,
        verdict=first[0][0] if first else word,
        sentence=" ".join([*(text for _, text in first), _sentence(word, sides.found, found)]),
        sides=sides.found,
        numbers=found,
        communication=communication_numbers(window, sides),
        streams=streams,
        causes=(*live.causes, *causes),
        lanes=_lanes(window, sides),
        names=timeline.names,
        not_known=not_known(window, sides),
        warnings=(*timeline.warnings, *live.warnings),
        origin_ns=timeline.origin_ns + window.begin,
        device_name=device.name if device else "",
        remarks=(*hints(window, sides), *remarks(window, sides), *live.remarks),
        watched=live.watched,
    )


def _sentence(word: Verdict, sides: SidesFound, found: Numbers) -> str:
    if word == "nothing_to_overlap":
        return "Nothing to overlap: " + (sides.why if not sides.names else "no moment was left in which both had work.")
    one, other = (_title(name) for name in sides.names)
    lost = f"{found.lost_ms:.1f} ms of {found.possible_ms:.1f} ms possible were lost"
    if found.possible_ms < 1:
        lost = f"{found.lost_ms:.3f} ms of {found.possible_ms:.3f} ms possible were lost"
    if word == "overlapped" and found.lost_ms >= _LEAST_MS:
        lost += f", less than the {OVERLAPPED_SHARE:.0%} from which causes are listed"
    verb = {"overlapped": "overlapped", "partial": "overlapped in part", "serial": "did not overlap"}[word]
    text = f"{one} and {other} {verb}: {lost}."
    return text[0].upper() + text[1:]


def _title(name: str) -> str:
    kind, _, value = name.partition(":")
    return f"{kind} {value}" if value else kind


def _causes(window: Window, sides: Sides, all_charges: Charges) -> tuple[CauseFound, ...]:
    """Gather charges by cause; the lost ones are scaled so that they add up to what was lost."""
    time = (all_charges.end - all_charges.begin) / 1e6
    if not all_charges.lost.any():
        return ()
    cost = time.copy()
    cost[all_charges.lost] = lost_cost(window, sides, all_charges.take(all_charges.lost)) / 1e6
    pending = read_pending(window)
    result = []
    for code in np.unique(all_charges.cause).tolist():
        mine = all_charges.cause == code
        lost = float(cost[mine & all_charges.lost].sum())
        idle = float(cost[mine & ~all_charges.lost].sum())
        result.append(_cause(window, sides, pending, all_charges.take(mine), lost, idle))
    return tuple(sorted(result, key=lambda item: -item.cost_ms))


def _cause(window: Window, sides: Sides, pending: Pending, found: Charges, lost: float, idle: float) -> CauseFound:
    about = cause(NAMES[int(found.cause[0])])
    where = places(window, pending, found)
    if about.name == "stream_alias":
        lane = window.lanes[int(window.lane[found.pending[0]])]
        where = (Place(alias_place(window.timeline, lane[1]), float((found.end - found.begin).sum()) / 1e6, 1),)
    times = np.column_stack((found.begin, found.end)) - window.begin
    # nothing is shown about what no rule explains
    likely = (
        about.name == "unknown" or (found.end - found.begin)[found.likely].sum() > 0.5 * (found.end - found.begin).sum()
    )
    return CauseFound(
        cause=about.name,
        lost_ms=lost,
        idle_ms=idle,
        recoverable=about.recoverable,
        certainty="likely" if likely else "shown",
        where=where[0].where if where else Where(),
        evidence=about.evidence(facts(window, sides, pending, found, lost, idle)),
        mend=(about.mend if likely else about.mend_shown or about.mend).rstrip("\n"),
        places=where,
        lost_intervals=union(times[found.lost]),
        idle_intervals=union(times[~found.lost]),
    )


def _lanes(window: Window, sides: Sides) -> tuple[Lane, ...]:
    work = window.work
    result = []
    for row, (device, stream) in enumerate(window.lanes):
        mine = window.lane == row
        result.append(
            Lane(
                device,
                stream,
                work.begin[mine] - window.begin,
                work.end[mine] - window.begin,
                work.name[mine],
                sides.side[mine].astype(np.int8),
            )
        )
    return tuple(result)
