"""Several traces at once: unrelated files, or the ranks of one job with their clocks aligned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchweave.diagnose.clocks import Meetings, meet
from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.errors import UnreadableInputError
from torchweave.trace.read import read
from torchweave.trace.timeline import Ints, Timeline

# numbers of ranks that differ by less are the same
_WORTH_SAYING = 0.05
# and so are those that differ by less than this share of the span
_OF_SPAN = 0.01


@dataclass(frozen=True, slots=True)
class Found:
    """The diagnoses of several files.

    Attributes:
        diagnoses: One a readable file, in the order given; ranks of one job in the order of their ranks.
        errors: Why the other files could not be read.
        differences: What differs between the ranks of one job, as sentences.
    """

    diagnoses: tuple[Diagnosis, ...]
    errors: tuple[UnreadableInputError, ...] = ()
    differences: tuple[str, ...] = ()


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
    if one_job and len(files) > 1:
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
    timelines, errors = [], []
    for file in files:
        try:
            timelines.append(read(file))
        except UnreadableInputError as error:
            errors.append(error)
    timelines.sort(key=lambda timeline: (timeline.rank is None, timeline.rank or 0, timeline.file))
    if not timelines:
        return Found((), tuple(errors))
    meetings = meet(timelines)
    diagnoses = tuple(
        # a rank that met no other says no more than it would alone
        _diagnose(timeline, late if meetings.num_matched else None, between, window_ms, range_name)
        for timeline, late in zip(timelines, meetings.late_until, strict=True)
    )
    return Found(diagnoses, tuple(errors), differences(diagnoses, meetings))


def differences(diagnoses: Sequence[Diagnosis], meetings: Meetings) -> tuple[str, ...]:
    """Return what differs between ranks, as sentences with numbers."""
    if len(diagnoses) < 2:
        return ()
    ranks = [str(row if found.rank is None else found.rank) for row, found in enumerate(diagnoses)]
    if meetings.num_matched == 0:
        texts = ["No collective is in two of the traces: their clocks could not be aligned."]
    else:
        many, apart_us = meetings.num_matched, meetings.spread_us
        texts = [f"Clocks aligned by {many} collectives: their ends lie {apart_us:.1f} us apart at the median."]
    worst = max(range(len(ranks)), key=lambda row: meetings.kept_ms[row])
    if meetings.kept_ms[worst] > 0:
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
