"""A diagnosis as text: the verdict, the numbers, the lanes, the causes by cost, and what is not known."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE, CauseFound, Diagnosis, Where
from torchweave.reporting.strip import LEVELS, MARKS, strip

# a cause below this share of the whole is named in one line, without its mend
_WORTH_A_PARAGRAPH = 0.02
_LABEL = 26
_SIDE_STYLES = {FIRST_SIDE: "blue", SECOND_SIDE: "dark_orange", 0: "bright_black"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a report.

    Attributes:
        text: Its characters.
        style: How a terminal shows it, in rich's words; empty for plain.
    """

    text: str
    style: str = ""


def report(diagnosis: Diagnosis, width: int = 100, *, levels: str = LEVELS) -> list[Line]:
    """Return the lines of a report.

    Args:
        diagnosis: The record.
        width: Columns of the terminal.
        levels: Characters of the lanes, from idle to busy.
    """
    lines = [Line(f"{diagnosis.file}{_rank(diagnosis)}", "dim")]
    verdict_style = "bold green" if diagnosis.verdict in ("overlapped", "nothing_to_overlap") else "bold red"
    lines += _wrapped(diagnosis.sentence, width, "", verdict_style)
    lines += [Line(""), *_numbers(diagnosis, width), Line(""), *_lanes(diagnosis, width, levels)]
    if diagnosis.causes:
        lines += [Line(""), *_causes(diagnosis, width)]
    also = (("Also seen", diagnosis.remarks), ("Not known", diagnosis.not_known), ("Warnings", diagnosis.warnings))
    for title, texts in also:
        if texts:
            lines += [Line(""), Line(title, "bold")]
            for text in texts:
                lines += _wrapped(text, width, "  ")
    return lines


def plain(lines: list[Line]) -> str:
    """Return a report as text without styles."""
    return "\n".join(line.text.rstrip() for line in lines) + "\n"


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
    yield Line("  " + "   ".join(f"{name} {value:.3f} ms" for name, value in first))
    if diagnosis.sides.names:
        one, other = diagnosis.sides.names
        yield Line(
            f"  {one} {found.first_ms:.3f} ms   {other} {found.second_ms:.3f} ms   both {found.both_ms:.3f} ms   "
            f"possible {found.possible_ms:.3f} ms   lost {found.lost_ms:.3f} ms"
        )
    talk = diagnosis.communication
    if talk is not None:
        yield Line(
            f"  communication {talk.busy_ms:.3f} ms   hidden {talk.hidden_ms:.3f} ms ({talk.hidden_share:.1%})   "
            f"exposed {talk.exposed_ms:.3f} ms"
        )
    yield from _wrapped(f"Sides: {diagnosis.sides.why}", width, "  ", "dim")


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
        mark = MARKS[row] if row < len(MARKS) else "-"
        head = f"{mark}. {cause.cause}: {_cost(cause)}"
        notes = [] if cause.recoverable else ["not recoverable"]
        notes += ["likely"] if cause.certainty == "likely" else []
        head += f" ({', '.join(notes)})" if notes else ""
        small = row > 0 and (cause.cost_ms < _WORTH_A_PARAGRAPH * total or cause.cause == "unknown")
        yield Line(("  " if small else "") + head, "" if small else "bold")
        if small:
            continue
        yield from _wrapped(f"Evidence: {cause.evidence}", width, "   ")
        yield Line(f"   Where: {where(cause.where)}")
        if cause.mend:
            yield Line("   Mend:")
            yield from (Line(f"     {text}", "green") for text in cause.mend.splitlines())
    mendable = [cause for cause in diagnosis.causes if cause.recoverable]
    lost, idle = sum(cause.lost_ms for cause in mendable), sum(cause.idle_ms for cause in mendable)
    yield from _wrapped(f"Mending can bring back at most {lost:.3f} ms of overlap, {idle:.3f} ms idle.", width, "")


def _cost(cause: CauseFound) -> str:
    parts = [f"{cause.lost_ms:.3f} ms of overlap lost"] if cause.lost_ms >= 0.0005 else []
    parts += [f"{cause.idle_ms:.3f} ms idle"] if cause.idle_ms >= 0.0005 else []
    return ", ".join(parts) or f"{cause.cost_ms * 1e6:.0f} ns"


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


def _wrapped(text: str, width: int, indent: str, style: str = "") -> list[Line]:
    rows = textwrap.wrap(text, max(40, width), initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    return [Line(row, style) for row in rows]
