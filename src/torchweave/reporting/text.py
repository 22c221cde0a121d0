"""A diagnosis as text: the verdict, the numbers, the lanes, the causes by cost, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE, CauseFound, Diagnosis, Where
from torchweave.intervals import length
from torchweave.reporting.lines import Line, wrapped
from torchweave.reporting.strip import LEVELS, mark, strip

# a cause below this share of the whole is named in one line, without its mend
_WORTH_A_PARAGRAPH = 0.02
# so many places of a cause are named, each if it has this share of the cause
_MOST_PLACES, _WORTH_A_PLACE = 3, 0.1
# less is nothing; moments this much longer than what was lost in them are told
_LEAST_MS, _CLEARLY_MORE = 0.0005, 1.2
_LABEL = 26
_SIDE_STYLES = {FIRST_SIDE: "blue", SECOND_SIDE: "dark_orange", 0: "bright_black"}


def report(diagnosis: Diagnosis, width: int = 100, *, levels: str = LEVELS) -> list[Line]:
    """Return the lines of a report.

    Args:
        diagnosis: The record.
        width: Columns of the terminal.
        levels: Characters of the lanes, from idle to busy.
    """
    lines = [Line(f"{diagnosis.file}{_rank(diagnosis)}", "dim")]
    verdict_style = "bold green" if diagnosis.verdict in ("overlapped", "nothing_to_overlap") else "bold red"
    lines += wrapped(diagnosis.sentence, width, "", verdict_style)
    lines += [Line(""), *_numbers(diagnosis, width), Line(""), *_lanes(diagnosis, width, levels)]
    if diagnosis.causes:
        lines += [Line(""), *_causes(diagnosis, width)]
    also = (("Also seen", diagnosis.remarks), ("Not known", diagnosis.not_known), ("Warnings", diagnosis.warnings))
    for title, texts in also:
        if texts:
            lines += [Line(""), Line(title, "bold")]
            for text in texts:
                lines += wrapped(text, width, "  ")
    return lines


def _rank(diagnosis: Diagnosis) -> str:
    device = f", {diagnosis.device_name}" if diagnosis.device_name else ""
    return f" (rank {diagnosis.rank}{device})" if diagnosis.rank is not None else device


def _numbers(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    found = diagnosis.numbers
    first = [
        ("span", found.span_ms),
        ("busy", found.busy_ms),
        ("idle", found.idle_ms),
        ("overlapped", found.overlapped_ms),
    ]
    yield from _parts(first, width)
    if diagnosis.sides.names:
        one, other = diagnosis.sides.names
        second = [
            (one, found.first_ms),
            (other, found.second_ms),
            ("both", found.both_ms),
            ("possible", found.possible_ms),
            ("lost", found.lost_ms),
        ]
        yield from _parts(second, width)
    talk = diagnosis.communication
    if talk is not None:
        yield Line(
            f"  communication {talk.busy_ms:.3f} ms   hidden {talk.hidden_ms:.3f} ms ({talk.hidden_share:.1%})   "
            f"exposed {talk.exposed_ms:.3f} ms"
        )
    if diagnosis.sides.names:
        yield from wrapped(f"Sides: {diagnosis.sides.why}", width, "  ", "dim")


def _parts(numbers: Sequence[tuple[str, float]], width: int) -> Iterator[Line]:
    """Yield named times, as many on a line as fit."""
    text = " "
    for name, value in numbers:
        part = f"{name} {value + 0.0:.3f} ms"
        if len(text) > 1 and len(text) + len(part) + 3 > width:
            yield Line(text)
            text = " "
        text += (" " if text == " " else "   ") + part
    yield Line(text)


def _lanes(diagnosis: Diagnosis, width: int, levels: str) -> Iterator[Line]:
    columns = max(20, width - _LABEL - 2)
    for row in strip(diagnosis, columns, levels=levels):
        yield Line(f"  {row.label[: _LABEL - 3]:<{_LABEL - 2}}{row.text}", _SIDE_STYLES[row.side])
    scale = f"{diagnosis.numbers.span_ms:.3f} ms"
    yield Line(f"{'':<{_LABEL}}0{scale:>{columns - 1}}", "dim")


def _causes(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    total = diagnosis.numbers.lost_ms + diagnosis.numbers.idle_ms
    yield Line("Causes, by cost", "bold")
    for row, cause in enumerate(diagnosis.causes):
        head = f"{mark(row)}. {cause.cause}: {_cost(cause)}"
        notes = [] if cause.recoverable else ["not recoverable"]
        notes += ["likely"] if cause.certainty == "likely" and cause.cause != "unknown" else []
        head += f" ({', '.join(notes)})" if notes else ""
        small = row > 0 and (cause.cost_ms < _WORTH_A_PARAGRAPH * total or cause.cause == "unknown")
        small = small and cause.costs_time
        yield Line(head, "" if small else "bold")
        if small:
            continue
        yield from wrapped(f"Evidence: {cause.evidence}", width, "   ")
        yield from wrapped(_counted(cause), width, "   ")
        yield from _places(cause, width)
        if cause.mend:
            yield Line("   Mend:")
            yield from (Line(f"     {text}", "green") for text in cause.mend.splitlines())
    mendable = [cause for cause in diagnosis.causes if cause.recoverable]
    if not any(cause.costs_time for cause in diagnosis.causes):
        return
    lost, idle = sum(cause.lost_ms for cause in mendable), sum(cause.idle_ms for cause in mendable)
    yield from wrapped(f"Mending can bring back at most {lost:.3f} ms of overlap, {idle:.3f} ms idle.", width, "")


def _counted(cause: CauseFound) -> str:
    """Say why what was lost is less than the moments it was lost in, where it clearly is."""
    moments_ms = length(cause.lost_intervals) / 1e6
    if cause.lost_ms < _LEAST_MS or moments_ms <= _CLEARLY_MORE * cause.lost_ms:
        return ""
    return f"Moments of {moments_ms:.3f} ms, in which one side or the other ran alone, lost {cause.lost_ms:.3f} ms."


def _places(cause: CauseFound, width: int) -> Iterator[Line]:
    """Yield the dearest place, and others that cost a good part of it."""
    yield from wrapped(f"Where: {where(cause.where)}", width, "   ")
    for place in cause.places[1:_MOST_PLACES]:
        if place.cost_ms >= _WORTH_A_PLACE * cause.cost_ms:
            yield from wrapped(f"and {where(place.where)}: {place.cost_ms:.3f} ms of moments", width, "     ")


def _cost(cause: CauseFound) -> str:
    if not cause.costs_time:
        return "costs no time, and makes a result or a measurement wrong"
    parts = [f"{cause.lost_ms:.3f} ms of overlap lost"] if cause.lost_ms >= _LEAST_MS else []
    parts += [f"{cause.idle_ms:.3f} ms idle"] if cause.idle_ms >= _LEAST_MS else []
    return ", ".join(parts) or "less than 0.001 ms"


def where(place: Where) -> str:
    """Return a place in words, as exactly as it is known."""
    parts = []
    if place.function:
        parts.append(f"{place.function}()" if place.function.isidentifier() else place.function)
    if place.op and place.op != place.function:
        parts.append(f"operator {place.op}")
    if place.call:
        parts.append(f"call {place.call}")
    if place.file:
        of = f"in {place.caller}, " if place.caller and place.caller != place.function else ""
        parts.append(f"{of}{place.file}:{place.line}")
    return ", ".join(parts) or "the trace does not say"
