"""What only a watched run can show: races, clocks read too early, streams that are one, and the cost of watching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchweave.diagnose.causes import Facts, cause
from torchweave.diagnose.model import CauseFound, Place, Watched, Where
from torchweave.diagnose.races import Race, races
from torchweave.diagnose.window import Window, launch_begin
from torchweave.diagnose.words import duration
from torchweave.trace.log import COLLECTIVES, Log
from torchweave.trace.timeline import Timeline

# the device has to have worked on for so long, and for this share of what the host measured: it is wrong by so much
_LEAST_NS, _WRONG_BY = 1_000_000, 0.25
# a loop that polls a clock measures nothing of what lies between two of its passes
_POLLING_NS = 50_000
# a watched step this much longer than an untouched one is told as launch-bound; collections this long are told
_DEAR, _LONG_COLLECTION_NS = 1.15, 1_000_000
_MOST_PLACES = 8
_WRITES = {True: "writes", False: "reads"}


@dataclass(frozen=True, slots=True)
class Reading:
    """Two reads of a host clock, and work launched between them that ran on after the second.

    Attributes:
        first: Row of `Log.clocks`.
        second: Row of `Log.clocks`.
        measured_ns: The time between the two.
        ran_on_ns: For how long the work ran on after the second.
    """

    first: int
    second: int
    measured_ns: int
    ran_on_ns: int


@dataclass(frozen=True, slots=True)
class Live:
    """What a log adds to a diagnosis.

    Attributes:
        causes: What costs no time but results or measurements; it stands first.
        remarks: What else was seen, as sentences.
        warnings: What the reader has to know of the recording.
        watched: The cost of watching; None where that was not measured.
    """

    causes: tuple[CauseFound, ...] = ()
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    watched: Watched | None = None


def look_live(window: Window) -> Live:
    """Return what the log of a window's run adds; nothing where it is a trace alone."""
    timeline = window.timeline
    log = timeline.log
    if log is None:
        return Live()
    followed, readings = log.followed(), early_readings(timeline)
    causes = (_race_cause(timeline, followed, races(followed)), _timed_cause(log, readings))
    watched = cost_of_watching(log)
    remarks = (_cost(log, watched), _environment(log), _collections(window, log), _allocator(log), *_others(log))
    ended = (f"The program ended with {log.error}; this is what ran before.",) if log.error else ()
    return Live(
        causes=tuple(found for found in causes if found is not None),
        remarks=tuple(text for text in (*remarks, *log.notes) if text),
        warnings=ended,
        watched=watched,
    )


def early_readings(timeline: Timeline) -> tuple[Reading, ...]:
    """Return measurements by a host clock between whose two reads work was launched that outlasted them.

    Two reads are a measurement where the program subtracts the one's value from the other's.

    Args:
        timeline: The trace, with its log.
    """
    log = timeline.log
    assert log is not None
    work = timeline.work
    launch = launch_begin(timeline, work)
    order = np.argsort(launch, kind="stable")
    launch, end = launch[order], work.end[order]
    clocks, result = log.clocks, []
    for first, second in _measurements(log):
        begin, until = clocks.at[first], clocks.at[second]
        low, high = np.searchsorted(launch, (begin, until))
        if high <= low or until - begin <= _POLLING_NS:
            continue
        ran_on = int(end[low:high].max()) - until
        if ran_on > max(_WRONG_BY * (until - begin), _LEAST_NS):
            result.append(Reading(first, second, until - begin, ran_on))
    return tuple(sorted(result, key=lambda reading: -reading.ran_on_ns))


def _measurements(log: Log) -> Iterator[tuple[int, int]]:
    """Yield pairs of reads: to each, the last one before it on its thread that it is compared with."""
    clocks = log.clocks
    earlier: dict[int, list[int]] = {}
    for first, second in log.measured:
        earlier.setdefault(second, []).append(first)
    last: dict[tuple[int, int], int] = {}
    for row in sorted(range(len(clocks)), key=lambda row: clocks.at[row]):
        thread, place = clocks.thread[row], clocks.place[row]
        known = [last[thread, first] for first in earlier.get(place, ()) if (thread, first) in last]
        if known:
            yield max(known, key=lambda first: clocks.at[first]), row
        last[thread, place] = row


def cost_of_watching(log: Log) -> Watched | None:
    """Return what watching cost, from steps with and without it; None where there are not both."""
    steps = log.steps
    rows = range(len(steps))
    with_it, without = ([row for row in rows if bool(steps.watched[row]) is flag] for flag in (True, False))
    if not with_it or not without:
        return None
    # the groups without it lie before and after: the clock of the device may drift
    plain = sum(steps.ms[row] for row in without) / sum(steps.count[row] for row in without)
    watched = sum(steps.ms[row] for row in with_it) / sum(steps.count[row] for row in with_it)
    each = [steps.ms[row] / steps.count[row] for row in without]
    return Watched(sum(steps.count[row] for row in with_it), watched, plain, min(each), max(each))


def _race_cause(timeline: Timeline, log: Log, found: Sequence[Race]) -> CauseFound | None:
    if not found:
        return None
    first = found[0]
    events, operators = log.events, log.operators

    def use(row: int, writes: bool, stream: int) -> str:
        name = log.names[operators.name[events.b[row]]]
        return f"{name} ({log.told(events.place[row])}) {_WRITES[writes]} on {_stream(timeline, stream)}"

    values: dict[str, Any] = {
        "earlier": use(first.first, first.first_writes, first.first_stream),
        "later": use(first.second, first.second_writes, first.second_stream),
        "own_wait": log.told(events.place[first.own_wait]) if first.own_wait >= 0 else "",
        "freed": first.freed,
        "pairs": len(found),
    }
    places = []
    for race in found[:_MOST_PLACES]:
        if race.own_wait >= 0:
            where = _where(log, events.place[race.own_wait], "wait_stream")
        else:
            where = _where(log, events.place[race.second], log.names[operators.name[events.b[race.second]]])
        places.append(Place(where, 0.0, 1))
    return _found("missing_wait", Facts(0.0, 0.0, len(found), values=values), places)


def _timed_cause(log: Log, readings: Sequence[Reading]) -> CauseFound | None:
    if not readings:
        return None
    worst = readings[0]
    counts: dict[Where, int] = {}
    for reading in readings:
        row = reading.second
        where = _where(log, log.clocks.place[row], log.names[log.clocks.name[row]])
        counts[where] = counts.get(where, 0) + 1
    values = {
        "first": log.told(log.clocks.place[worst.first]),
        "second": log.told(log.clocks.place[worst.second]),
        "measured": duration(worst.measured_ns / 1e3),
        "ran_on": duration(worst.ran_on_ns / 1e3),
        "readings": len(readings),
    }
    places = [Place(where, 0.0, count) for where, count in counts.items()][:_MOST_PLACES]
    return _found("timed_without_sync", Facts(0.0, 0.0, len(readings), values=values), places)


def _found(name: str, facts: Facts, places: Sequence[Place]) -> CauseFound:
    about = cause(name)
    return CauseFound(
        cause=name,
        lost_ms=0.0,
        idle_ms=0.0,
        recoverable=about.recoverable,
        certainty="shown",
        where=places[0].where,
        evidence=about.evidence(facts),
        mend=about.mend.rstrip("\n"),
        places=tuple(places),
        costs_time=False,
    )


def _where(log: Log, row: int, called: str) -> Where:
    frame = log.place(row)
    name = called.rpartition("::")[2].partition(".")[0]
    if frame is None:
        return Where(function=name or None)
    return Where(file=frame[0], line=frame[1], function=name or frame[2], caller=frame[2])


def _stream(timeline: Timeline, pointer: int) -> str:
    if pointer == COLLECTIVES:
        return "a stream of collectives"
    number = timeline.streams.get(pointer)
    return f"stream {pointer:#x}" if number is None else f"stream {number}"


def _cost(log: Log, watched: Watched | None) -> str:
    if watched is None:
        num = len(log.spans)
        if not log.entry_us or not num:
            return ""
        return (
            f"Watching cost the host about {duration(num * log.entry_us)}: {num} entries of {log.entry_us:.1f} us, "
            "as measured in the same process. The factor was not measured: that takes steps, "
            "`torchweave.step()` or an optimizer's."
        )
    text = (
        f"Watching made a step {watched.factor:.2f} times as long: {watched.watched_ms:.3f} ms watched "
        f"({watched.num_steps} steps), {watched.plain_ms:.3f} ms without "
        f"({watched.least_ms:.3f} to {watched.most_ms:.3f})."
    )
    # groups without watching that lie farther apart than that say nothing
    if watched.factor > _DEAR and watched.watched_ms > watched.most_ms:
        text += (
            " So the host is what these steps wait for (launch-bound, or nearly): causes of the host weigh more here "
            "than without watching."
        )
    return text


def _environment(log: Log) -> str:
    if not log.environment:
        return "Environment: none of the variables that decide about overlap is set."
    return "Environment: " + ", ".join(f"{name}={value}" for name, value in sorted(log.environment.items())) + "."


def _collections(window: Window, log: Log) -> str:
    table = log.collections
    rows = [row for row in range(len(table)) if table.end[row] > window.begin and table.begin[row] < window.end]
    total = sum(table.end[row] - table.begin[row] for row in rows)
    if total < _LONG_COLLECTION_NS:
        return ""
    longest = max(table.end[row] - table.begin[row] for row in rows)
    return (
        f"Python's garbage collector held the interpreter {len(rows)} times for {total / 1e6:.3f} ms, "
        f"{longest / 1e6:.3f} ms the longest."
    )


def _allocator(log: Log) -> str:
    retries = log.allocator.get("num_alloc_retries", 0)
    if retries <= 0:
        return ""
    return (
        f"The caching allocator ran out of memory {retries} times, freed its cached blocks (which waits for the "
        "device) and tried again: lower the peak, or see `torchweave explain device_alloc`."
    )


def _others(log: Log) -> tuple[str, ...]:
    if not log.others:
        return ()
    return (f"Other processes had the device too (other_process): {'; '.join(log.others)}.",)
