"""Several traces at once: unrelated files, or the ranks of one job with their clocks aligned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchweave.diagnose.clocks import Meetings, meet
from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.errors import UnreadableInputError
from torchweave.trace.parse import NoTraceError
from torchweave.trace.read import read
from torchweave.trace.timeline import Ints, Timeline

_RANK_IN_NAME = re.compile(r"rank[_-]?\d+", re.IGNORECASE)
# numbers of ranks that differ by less are the same
_WORTH_SAYING = 0.05
# ends of one collective lie closer than this after aligning, or the traces are not of one run
_MOST_SPREAD_US = 1000.0
# and so are those that differ by less than this share of the span
_OF_SPAN = 0.01


@dataclass(frozen=True, slots=True)
class Found:
    """The diagnoses of several files.

    Attributes:
        diagnoses: One a readable file, in the order given; ranks of one job in the order of their ranks.
        errors: Why the other files could not be read.
        skipped: Files of a folder that are JSON and no trace.
        differences: What differs between the ranks of one job, as sentences.
    """

    diagnoses: tuple[Diagnosis, ...]
    errors: tuple[UnreadableInputError, ...] = ()
    differences: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def diagnose_files(
    files: Sequence[Path],
    *,
    between: Sequence[str] | None = None,
    window_ms: tuple[float, float] | None = None,
    range_name: str | None = None,
    one_job: bool = False,
) -> Found:
    """Diagnose files.

    Args:
        files: The traces.
        between: See `diagnose`.
        window_ms: See `diagnose`.
        range_name: See `diagnose`.
        one_job: They are ranks of one job: who waited for whom is looked up in the others.
    """
    if one_job:
        return _one_job(files, between, window_ms, range_name)
    diagnoses, errors = [], []
    for file in files:
        try:
            timeline = read(file)
        except UnreadableInputError as error:
            errors.append(error)
            continue
        diagnoses.append(_diagnose(timeline, None, between, window_ms, range_name))
    return Found(tuple(diagnoses), tuple(errors))


def _diagnose(
    timeline: Timeline,
    late_until: Ints | None,
    between: Sequence[str] | None,
    window_ms: tuple[float, float] | None,
    range_name: str | None,
) -> Diagnosis:
    return diagnose(timeline, between=between, window_ms=window_ms, range_name=range_name, late_until=late_until)


def _one_job(
    files: Sequence[Path],
    between: Sequence[str] | None,
    window_ms: tuple[float, float] | None,
    range_name: str | None,
) -> Found:
    timelines, errors, skipped = [], [], []
    for file in files:
        try:
            timelines.append(read(file))
        except NoTraceError:
            skipped.append(str(file))
        except UnreadableInputError as error:
            errors.append(error)
    timelines.sort(key=lambda timeline: (timeline.rank is None, timeline.rank or 0, timeline.file))
    diagnoses: list[Diagnosis] = []
    texts: list[str] = []
    jobs = _jobs(timelines)
    for job in jobs:
        meetings = meet(job)
        # a rank that met no other says no more than it would alone
        lates = meetings.late_until if _aligned(meetings) else (None,) * len(job)
        mine = [_diagnose(*pair, between, window_ms, range_name) for pair in zip(job, lates, strict=True)]
        title = f"{Path(job[0].file).name} and its like: " if len(jobs) > 1 else ""
        texts += [title + text for text in differences(mine, meetings)]
        diagnoses += mine
    return Found(tuple(diagnoses), tuple(errors), tuple(texts), tuple(skipped))


def _aligned(meetings: Meetings) -> bool:
    return meetings.num_matched > 0 and meetings.spread_us <= _MOST_SPREAD_US


def _jobs(timelines: Sequence[Timeline]) -> list[list[Timeline]]:
    """Return which traces are ranks of the same job: all, unless a rank is there twice; then those named alike."""
    if _all_ranks_differ(timelines):
        return [list(timelines)] if timelines else []
    groups: dict[str, list[Timeline]] = {}
    for timeline in timelines:
        groups.setdefault(_RANK_IN_NAME.sub("", Path(timeline.file).name), []).append(timeline)
    jobs: list[list[Timeline]] = []
    for group in groups.values():
        # ranks that are there several times under one name cannot be told apart
        jobs += [group] if _all_ranks_differ(group) else [[timeline] for timeline in group]
    return jobs


def _all_ranks_differ(timelines: Sequence[Timeline]) -> bool:
    ranks = [timeline.rank for timeline in timelines if timeline.rank is not None]
    return len(ranks) == len(set(ranks))


def differences(diagnoses: Sequence[Diagnosis], meetings: Meetings) -> tuple[str, ...]:
    """Return what differs between ranks, as sentences with numbers."""
    if len(diagnoses) < 2 or (meetings.num_matched == 0 and any(found.rank is None for found in diagnoses)):
        return ()
    ranks = [str(row if found.rank is None else found.rank) for row, found in enumerate(diagnoses)]
    if meetings.num_matched == 0:
        texts = ["No collective is in two of the traces: their clocks could not be aligned."]
    elif not _aligned(meetings):
        texts = [
            f"The clocks could not be aligned: the ends of common collectives lie {meetings.spread_us:.0f} us apart."
        ]
    else:
        many, apart_us = meetings.num_matched, meetings.spread_us
        texts = [f"Clocks aligned by {many} collectives: their ends lie {apart_us:.1f} us apart at the median."]
    worst = max(range(len(ranks)), key=lambda row: meetings.kept_ms[row])
    if _aligned(meetings) and meetings.kept_ms[worst] > 0:
        texts.append(
            f"Rank {ranks[worst]} came last to {meetings.last[worst]} of {meetings.num_matched} collectives and kept "
            f"the others waiting for {meetings.kept_ms[worst]:.3f} ms."
        )
        waits = (f"rank {rank} {waited:.3f} ms" for rank, waited in zip(ranks, meetings.waited_ms, strict=True))
        texts.append(f"Waited for others: {', '.join(waits)}.")
    for name, values in (
        ("Span", [found.numbers.span_ms for found in diagnoses]),
        ("Busy time of the first side", [found.numbers.first_ms for found in diagnoses]),
        ("Busy time of the second side", [found.numbers.second_ms for found in diagnoses]),
        ("Lost overlap", [found.numbers.lost_ms for found in diagnoses]),
        ("Idle time", [found.numbers.idle_ms for found in diagnoses]),
    ):
        apart = max(values) - min(values)
        if apart > _WORTH_SAYING * max(values) and apart > _OF_SPAN * diagnoses[0].numbers.span_ms:
            least, most = (values.index(choose(values)) for choose in (min, max))
            texts.append(
                f"{name}: {min(values):.3f} ms on rank {ranks[least]} to {max(values):.3f} ms on rank {ranks[most]}."
            )
    return tuple(texts)
