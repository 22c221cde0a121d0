"""What a change did: two diagnoses side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torchweave.diagnose.model import Diagnosis
from torchweave.reporting.table import aligned
from torchweave.reporting.text import Line

_NUMBERS = ("span_ms", "busy_ms", "idle_ms", "overlapped_ms", "possible_ms", "lost_ms")
# a number that changed by less stayed the same: clocks and weather
_SAME = 0.02


@dataclass(frozen=True, slots=True)
class Change:
    """One number before and after.

    Attributes:
        name: What it is.
        before: Its value before, ms.
        after: Its value after, ms.
    """

    name: str
    before: float
    after: float

    @property
    def share(self) -> float:
        """The change as a share of the value before; 0 where that was 0."""
        return (self.after - self.before) / self.before if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a change did.

    Attributes:
        before: The diagnosis before.
        after: The diagnosis after.
        numbers: The windows' numbers.
        causes: What each cause cost, the greatest change first.
        sentence: The result in words.
    """

    before: Diagnosis
    after: Diagnosis
    numbers: tuple[Change, ...]
    causes: tuple[Change, ...]
    sentence: str


def compare(before: Diagnosis, after: Diagnosis) -> Comparison:
    """Compare two diagnoses of the same program before and after a change."""
    numbers = [Change(name, getattr(before.numbers, name), getattr(after.numbers, name)) for name in _NUMBERS]
    if before.communication or after.communication:
        talks = [(found.communication.exposed_ms if found.communication else 0.0) for found in (before, after)]
        numbers.append(Change("exposed communication_ms", *talks))
    costs = [{cause.cause: cause.cost_ms for cause in found.causes} for found in (before, after)]
    names = {**costs[0], **costs[1]}
    causes = [Change(name, costs[0].get(name, 0.0), costs[1].get(name, 0.0)) for name in names]
    causes.sort(key=lambda change: -abs(change.after - change.before))
    return Comparison(before, after, tuple(numbers), tuple(causes), _sentence(before, after, causes))


def _sentence(before: Diagnosis, after: Diagnosis, causes: list[Change]) -> str:
    span = Change("span", before.numbers.span_ms, after.numbers.span_ms)
    how = "as long as before" if abs(span.share) < _SAME else "shorter" if span.share < 0 else "longer"
    text = f"The window is {how}: {span.before:.3f} ms before, {span.after:.3f} ms after ({span.share:+.1%})."
    text += f" Verdict: {before.verdict} before, {after.verdict} after."
    gone = [change.name for change in causes if change.before > 0 and change.after == 0]
    come = [change.name for change in causes if change.after > 0 and change.before == 0]
    text += f" Gone: {', '.join(gone)}." if gone else ""
    text += f" New: {', '.join(come)}." if come else ""
    if before.sides.names != after.sides.names:
        text += " The sides are not the same: choose them with --between to compare like with like."
    return text


def lines(found: Comparison) -> list[Line]:
    """Return a comparison as lines of text."""
    result = [Line(f"before: {found.before.file}", "dim"), Line(f"after:  {found.after.file}", "dim")]
    result += [Line(found.sentence, "bold"), Line("")]
    result += aligned([("number", "before", "after", "change"), *map(_row, found.numbers)])
    if found.causes:
        result += [Line(""), *aligned([("cause", "before ms", "after ms", "change"), *map(_row, found.causes)])]
    return result


def _row(change: Change) -> tuple[str, str, str, str]:
    share = f"{change.share:+.1%}" if change.before else "-"
    return (change.name, f"{change.before:.3f}", f"{change.after:.3f}", share)


def to_json(found: Comparison) -> str:
    """Return a comparison as JSON text."""

    def rows(changes: tuple[Change, ...]) -> list[dict[str, Any]]:
        return [{"name": row.name, "before_ms": row.before, "after_ms": row.after} for row in changes]

    value = {
        "schema": 1,
        "before": {"file": found.before.file, "verdict": found.before.verdict},
        "after": {"file": found.after.file, "verdict": found.after.verdict},
        "sentence": found.sentence,
        "numbers": rows(found.numbers),
        "causes": rows(found.causes),
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
