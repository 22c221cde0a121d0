"""What a change did: two diagnoses side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.overlap import OVERLAPPED_SHARE
from torchweave.reporting.lines import Line
from torchweave.reporting.table import aligned

_NUMBERS = ("span_ms", "busy_ms", "idle_ms", "overlapped_ms", "possible_ms", "lost_ms")
# a number that changed by less stayed the same: clocks and weather
_SAME = 0.02
# less lost and idle time than this is none
_LEAST_MS = 0.0005


@dataclass(frozen=True, slots=True)
class Change:
    """One number before and after.

    Attributes:
        name: What it is.
        before: Its value before, ms; None where it was not looked for (an overlapped window lists no causes).
        after: Its value after, ms, or None likewise.
    """

    name: str
    before: float | None
    after: float | None

    @property
    def share(self) -> float | None:
        """The change as a share of the value before; None where one of the two is not known, or nothing was before."""
        if not self.before or self.after is None:
            return None
        return (self.after - self.before) / self.before


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
    # what no one looked for is not gone
    rest = [0.0 if found.causes or _all_used(found) else None for found in (before, after)]
    causes = [
        Change(name, costs[0].get(name, rest[0]), costs[1].get(name, rest[1])) for name in {**costs[0], **costs[1]}
    ]
    causes.sort(key=lambda change: -abs((change.after or 0.0) - (change.before or 0.0)))
    return Comparison(before, after, tuple(numbers), tuple(causes), _sentence(before, after, causes))


def _all_used(found: Diagnosis) -> bool:
    """Return whether a window without causes has nothing that one could be charged with."""
    return found.numbers.lost_ms + found.numbers.idle_ms < _LEAST_MS


def _sentence(before: Diagnosis, after: Diagnosis, causes: list[Change]) -> str:
    spans = before.numbers.span_ms, after.numbers.span_ms
    share = Change("span", *spans).share or 0.0
    how = "as long as before" if abs(share) < _SAME else "shorter" if share < 0 else "longer"
    text = f"The window is {how}: {spans[0]:.3f} ms before, {spans[1]:.3f} ms after ({share:+.1%})."
    text += f" Verdict: {before.verdict} before, {after.verdict} after."
    gone = [change.name for change in causes if change.before and change.after == 0]
    come = [change.name for change in causes if change.after and change.before == 0]
    text += f" Gone: {', '.join(gone)}." if gone else ""
    text += f" New: {', '.join(come)}." if come else ""
    for when, found in (("before", before), ("after", after)):
        if not found.causes and not _all_used(found):
            text += f" No causes are listed {when}: {_little(found)}."
    if before.sides.names != after.sides.names:
        text += " The sides are not the same: choose them with --between to compare like with like."
    return text


def _little(found: Diagnosis) -> str:
    if found.verdict == "nothing_to_overlap":
        return "there was nothing to overlap"
    share = found.numbers.lost_ms / found.numbers.possible_ms
    return f"what was lost ({share:.0%} of what was possible) is below the threshold ({OVERLAPPED_SHARE:.0%})"


def lines(found: Comparison) -> list[Line]:
    """Return a comparison as lines of text."""
    result = [Line(f"before: {found.before.file}", "dim"), Line(f"after:  {found.after.file}", "dim")]
    result += [Line(found.sentence, "bold"), Line("")]
    result += aligned([("number", "before", "after", "change"), *map(_row, found.numbers)])
    if found.causes:
        result += [Line(""), *aligned([("cause", "before ms", "after ms", "change"), *map(_row, found.causes)])]
    return result


def _row(change: Change) -> tuple[str, str, str, str]:
    share = "-" if change.share is None else f"{change.share:+.1%}"
    return (change.name, _ms(change.before), _ms(change.after), share)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.3f}"


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
