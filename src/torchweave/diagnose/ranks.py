"""Several traces at once: unrelated files, or the ranks of one job with their clocks aligned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchweave.diagnose.clocks import Meetings, meet
from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.diagnose.words import duration
from torchweave.errors import UnreadableInputError
from torchweave.trace.parse import NoTraceError
from torchweave.trace.read import read
from torchweave.trace.timeline import Timeline

_RANK_IN_NAME = re.compile(r"rank[_-]?\d+", re.IGNORECASE)
# numbers of ranks that differ by less are the same
_WORTH_SAYING = 0.05
# ends of one collective lie closer than this after aligning, or the traces are not of one run
_MOST_SPREAD_US = 1000.0
# and so are those that differ by less than this share of the span
_OF_SPAN = 0.01
_NOT_ONE_RUN = "They may be of different jobs, or of different steps; what each says of itself holds all the same."


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
        diagnoses.append(diagnose(timeline, between=between, window_ms=window_ms, range_name=range_name))
    return Found(tuple(diagnoses), tuple(errors))


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
    texts += _not_one_job(timelines, jobs)
    for job in jobs:
        meetings = meet(job)
        # a rank that met no other says no more than it would alone
        know = _aligned(meetings)
        mine = [
            diagnose(
                timeline,
                between=between,
                window_ms=window_ms,
                range_name=range_name,
                late_until=meetings.late_until[row] if know else None,
                late_known=meetings.met[row] if know else None,
            )
            for row, timeline in enumerate(job)
        ]
        title = f"{_RANK_IN_NAME.sub('rank*', Path(job[0].file).name)}: " if len(jobs) > 1 else ""
        texts += [title + text for text in differences(mine, meetings)]
        diagnoses += mine
    return Found(tuple(diagnoses), tuple(errors), tuple(texts), tuple(skipped))


def _aligned(meetings: Meetings) -> bool:
    return meetings.num_matched > 0 and meetings.spread_us <= _MOST_SPREAD_US


def _jobs(timelines: Sequence[Timeline]) -> list[list[Timeline]]:
    """Return which traces are ranks of the same job.

    All, unless a rank is there twice or they name worlds of different size; then those named alike.
    """
    if _all_ranks_differ(timelines) and len(_worlds(timelines)) < 2:
        return [list(timelines)] if timelines else []
    groups: dict[tuple[str, int | None], list[Timeline]] = {}
    for timeline in timelines:
        key = (_RANK_IN_NAME.sub("", Path(timeline.file).name), timeline.world_size)
        groups.setdefault(key, []).append(timeline)
    jobs: list[list[Timeline]] = []
    for group in groups.values():
        # ranks that are there several times under one name cannot be told apart
        jobs += [group] if _all_ranks_differ(group) else [[timeline] for timeline in group]
    return jobs


def _not_one_job(timelines: Sequence[Timeline], jobs: Sequence[Sequence[Timeline]]) -> list[str]:
    """Say, by file name, why the traces are not taken as ranks of one job, and which ones are."""
    if len(jobs) < 2:
        return []
    texts = []
    for rank in sorted({timeline.rank for timeline in timelines if timeline.rank is not None}):
        same = [timeline for timeline in timelines if timeline.rank == rank]
        if len(same) > 1:
            texts.append(f"Rank {rank} is there {len(same)} times: {_files(same)}.")
    if len(worlds := _worlds(timelines)) > 1:
        sizes = (
            f"{size} ranks in {_files([timeline for timeline in timelines if timeline.world_size == size])}"
            for size in worlds
        )
        texts.append(f"The traces are of jobs of different size: {'; '.join(sizes)}.")
    together = [_files(job) for job in jobs if len(job) > 1]
    read = f"Read together, by their names: {'; '.join(together)}. " if together else ""
    texts.append(f"So this folder is not one job. {read}Every other trace is read alone.")
    return texts


def _files(timelines: Sequence[Timeline]) -> str:
    return ", ".join(Path(timeline.file).name for timeline in timelines)


def _worlds(timelines: Sequence[Timeline]) -> list[int]:
    return sorted({timeline.world_size for timeline in timelines if timeline.world_size is not None})


def _all_ranks_differ(timelines: Sequence[Timeline]) -> bool:
    ranks = [timeline.rank for timeline in timelines if timeline.rank is not None]
    return len(ranks) == len(set(ranks))


def differences(diagnoses: Sequence[Diagnosis], meetings: Meetings) -> tuple[str, ...]:
    """Return what differs between ranks, as sentences with numbers."""
    if len(diagnoses) < 2 or (meetings.num_matched == 0 and any(found.rank is None for found in diagnoses)):
        return ()
    ranks = [
        f"rank {found.rank}" if found.rank is not None else f"the rank of {Path(found.file).name}"
        for found in diagnoses
    ]
    spread = duration(meetings.spread_us)
    names = ", ".join(Path(found.file).name for found in diagnoses)
    if meetings.num_matched == 0:
        texts = [f"No collective is in two of the traces ({names}): their clocks could not be aligned. {_NOT_ONE_RUN}"]
    elif not _aligned(meetings):
        lie = f"the ends of common collectives of {names} lie {spread} apart"
        texts = [f"The clocks could not be aligned: {lie}. {_NOT_ONE_RUN}"]
    else:
        texts = [f"Clocks aligned by {meetings.num_matched} collectives: their ends lie {spread} apart at the median."]
    worst = max(range(len(ranks)), key=lambda row: meetings.kept_ms[row])
    if _aligned(meetings) and meetings.kept_ms[worst] > 0:
        texts.append(
            f"{ranks[worst][0].upper()}{ranks[worst][1:]} came last to {meetings.last[worst]} of "
            f"{meetings.num_matched} collectives and kept the others waiting for {meetings.kept_ms[worst]:.3f} ms."
        )
        waits = (f"{rank} {waited:.3f} ms" for rank, waited in zip(ranks, meetings.waited_ms, strict=True))
        texts.append(f"Waited for others: {', '.join(waits)}.")
    for name, values in (
        ("Span", [found.numbers.span_ms for found in diagnoses]),
        (f"Busy time of {_side(diagnoses, 0)}", [found.numbers.first_ms for found in diagnoses]),
        (f"Busy time of {_side(diagnoses, 1)}", [found.numbers.second_ms for found in diagnoses]),
        ("Lost overlap", [found.numbers.lost_ms for found in diagnoses]),
        ("Idle time", [found.numbers.idle_ms for found in diagnoses]),
    ):
        apart = max(values) - min(values)
        if apart > _WORTH_SAYING * max(values) and apart > _OF_SPAN * diagnoses[0].numbers.span_ms:
            least, most = (values.index(choose(values)) for choose in (min, max))
            texts.append(f"{name}: {min(values):.3f} ms on {ranks[least]} to {max(values):.3f} ms on {ranks[most]}.")
    return tuple(texts)


def _side(diagnoses: Sequence[Diagnosis], number: int) -> str:
    """Return the name of a side, where all ranks have the same ones."""
    names = {found.sides.names for found in diagnoses}
    both = next(iter(names)) if len(names) == 1 else ()
    return both[number] if both else ("the first side", "the second side")[number]
