"""One self-contained HTML page: the verdict, the numbers, the lanes, and the causes beside them.

The page needs no network. Names of kernels are whatever a trace holds, so everything that is not ours is escaped, and
the page's own policy lets no script run but ours.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchweave.diagnose.causes import CODE, cause
from torchweave.diagnose.model import NO_SIDE, CauseFound, Diagnosis, Numbers, Where
from torchweave.diagnose.overlap import OVERLAPPED_SHARE
from torchweave.errors import UsageError
from torchweave.intervals import length
from torchweave.reporting.embed import safe_json, section_data
from torchweave.reporting.output import open_output
from torchweave.reporting.strip import mark
from torchweave.reporting.tracks import side_titles

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

# the word and the sign of each verdict: the colour is never alone
VERDICTS = {
    "overlapped": ("Overlapped", "✓"),
    "partial": ("Partly overlapped", "◐"),
    "serial": ("Not overlapped", "✕"),
    "nothing_to_overlap": ("Nothing to overlap", "–"),
    "race": ("A race", "!"),
    "mistimed": ("Mistimed", "!"),
}
# how many places of a cause are listed, how many parts a bar has, and the least share of one: the rest are added up
_NUM_PLACES, _NUM_PARTS, _LEAST_PART = 8, 6, 0.005
_SCRIPTS = ("columns.js", "lanes.js", "figure.js", "handles.js", "page.js")


def write_html(diagnoses: Sequence[Diagnosis], path: str | Path, *, differences: Sequence[str] = ()) -> None:
    """Write diagnoses as one HTML page.

    Args:
        diagnoses: One a trace; several get a table on top and a section each.
        path: The file; one that exists is replaced.
        differences: What differs between the ranks of one job, as sentences.

    Raises:
        UsageError: There is no diagnosis, or the file cannot be written.
    """
    text = render_html(diagnoses, differences)
    with open_output(path) as file:
        # names can hold halves of characters (lone surrogates), which no file can
        file.write(text.encode("utf-8", "replace"))


def render_html(diagnoses: Sequence[Diagnosis], differences: Sequence[str] = ()) -> str:
    """Return diagnoses as the text of one HTML page.

    Args:
        diagnoses: One a trace.
        differences: What differs between them, as sentences.

    Raises:
        UsageError: There is no diagnosis.
    """
    if not diagnoses:
        raise UsageError("A report has to have a diagnosis", given="none")
    from markupsafe import Markup

    environment = page_environment()
    script = "".join(page_source(environment, name) for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # ours, or made safe above: nothing in them comes from a trace as it is
    return environment.get_template("report.html.j2").render(
        sections=[_section(row, diagnosis) for row, diagnosis in enumerate(diagnoses)],
        differences=differences,
        overlapped_share=OVERLAPPED_SHARE,
        style=Markup(page_source(environment, "report.css")),  # noqa: S704
        script=Markup(script),  # noqa: S704
        script_digest=digest,
    )


def page_environment() -> Environment:
    """Return where pages come from: what is put into them is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("torchweave.reporting", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ms"] = format_ms
    environment.filters["percent"] = format_percent
    environment.filters["prose"] = _prose
    return environment


def page_source(environment: Environment, name: str) -> str:
    """Return a file that goes into a page as it is."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _prose(text: str) -> Markup:
    """Return a text escaped, with what stands in backticks as code."""
    from markupsafe import Markup, escape

    pieces = text.split("`")
    # the odd pieces are inside, unless the last backtick has no partner
    inside = range(1, len(pieces) - 1, 2)
    code = Markup("<code>{}</code>")
    return Markup("").join(
        code.format(piece) if row in inside else escape(f"`{piece}" if row % 2 else piece)
        for row, piece in enumerate(pieces)
    )


def format_ms(value: float) -> str:
    """Return milliseconds with about four digits: `0.013`, `2.81`, `1,234`."""
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    # plus zero: what rounds to nothing has no sign
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def format_percent(share: float) -> str:
    """Return a share as a percentage that says 0 or 100 only where it is."""
    percent = 100 * share
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.1f} %"


def _section(row: int, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what the template needs of one diagnosis."""
    from markupsafe import Markup

    word, sign = VERDICTS[diagnosis.verdict]
    return {
        "id": f"d{row}",
        "diagnosis": diagnosis,
        "title": diagnosis.file if diagnosis.rank is None else f"Rank {diagnosis.rank}",
        "verdict_word": word,
        "verdict_sign": sign,
        "sides": side_titles(diagnosis),
        "has_neither": any((lane.side == NO_SIDE).any() for lane in diagnosis.lanes),
        "bars": _bars(diagnosis),
        "mendable": _mendable(diagnosis),
        "causes": [_cause(row, found) for row, found in enumerate(diagnosis.causes)],
        "data": Markup(safe_json(section_data(diagnosis))),  # noqa: S704
    }


def _cause(row: int, found: CauseFound) -> dict[str, Any]:
    return {
        "row": row,
        "mark": mark(row),
        "found": found,
        "line": cause(found.cause).line if found.cause in CODE else "",
        "where": _where(found.where),
        "places": [
            {"text": "; ".join(f"{term} {text}" for term, text in _where(place.where)), "place": place}
            for place in found.places[:_NUM_PLACES]
        ]
        if len(found.places) > 1
        else [],
        "num_more": max(len(found.places) - _NUM_PLACES, 0),
        "scaled": _scaled(found),
    }


def _scaled(found: CauseFound) -> str:
    """Say how the moments in the lanes and `lost_ms` go together, where they are not the same."""
    raw_ms = length(found.lost_intervals) / 1e6
    if raw_ms <= 1.01 * found.lost_ms + 0.001:
        return ""
    return (
        f"Its moments in the lanes, in which one side ran alone, last {format_ms(raw_ms)} ms together. They count as "
        f"{format_ms(found.lost_ms)} ms: two stretches that could have run together lose that overlap once."
    )


def _mendable(diagnosis: Diagnosis) -> str:
    """Say what mending could bring at most."""
    if not diagnosis.causes:
        return ""
    lost = sum(found.lost_ms for found in diagnosis.causes if found.recoverable)
    idle = sum(found.idle_ms for found in diagnosis.causes if found.recoverable)
    if lost + idle <= 0:
        return "None of these causes is one that the program can mend."
    return (
        f"The most that mending could bring back: {format_ms(lost)} of {format_ms(diagnosis.numbers.lost_ms)} ms of "
        f"lost overlap, and {format_ms(idle)} of {format_ms(diagnosis.numbers.idle_ms)} ms of idle time."
    )


def _where(where: Where) -> list[tuple[str, str]]:
    """Return what is known of a place, as pairs of a term and its text."""
    at = where.file if where.line is None or where.file is None else f"{where.file}:{where.line}"
    rows = (
        ("in", where.caller if where.caller != where.function else None),
        ("at", at),
        ("function", where.function),
        ("operator", where.op),
        ("call", where.call),
    )
    return [(term, text) for term, text in rows if text]


def _bars(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return the two sums that the causes explain, each as the parts of a bar."""
    numbers: Numbers = diagnosis.numbers
    bars = []
    if numbers.possible_ms > 0:
        ran = {"kind": "both", "label": "both sides ran", "ms": max(numbers.possible_ms - numbers.lost_ms, 0.0)}
        lost = _charges(diagnosis, "lost", numbers.lost_ms)
        bars.append(_bar("Possible overlap", numbers.possible_ms, [ran, *lost]))
    if numbers.idle_ms > 0:
        busy = {"kind": "busy", "label": "something ran", "ms": numbers.busy_ms}
        idle = _charges(diagnosis, "idle", numbers.idle_ms)
        bars.append(_bar("Span", numbers.span_ms, [busy, *idle]))
    return bars


def _charges(diagnosis: Diagnosis, kind: str, total_ms: float) -> list[dict[str, Any]]:
    """Return the causes' shares of lost overlap or idle time; what none of them has keeps a part of its own."""
    parts: list[dict[str, Any]] = [
        {"kind": kind, "label": found.cause, "mark": mark(row), "ms": getattr(found, f"{kind}_ms")}
        for row, found in enumerate(diagnosis.causes)
    ]
    parts = sorted((part for part in parts if part["ms"] > 0), key=lambda part: -float(part["ms"]))
    num_shown = min(_NUM_PARTS, sum(part["ms"] >= _LEAST_PART * total_ms for part in parts))
    shown, rest = parts[:num_shown], parts[num_shown:]
    if len(rest) == 1:
        shown, rest = parts, []
    if rest:
        shown.append({"kind": kind, "label": f"{len(rest)} other causes", "ms": sum(part["ms"] for part in rest)})
    missing = total_ms - sum(part["ms"] for part in parts)
    if missing > 0.01 * total_ms:
        shown.append({"kind": kind, "label": "lost, not charged" if kind == "lost" else "idle", "ms": missing})
    return shown


def _bar(title: str, total_ms: float, parts: list[dict[str, Any]]) -> dict[str, Any]:
    whole = max(sum(part["ms"] for part in parts), total_ms, 1e-9)
    for part in parts:
        part["share"] = part["ms"] / whole
        part.setdefault("mark", None)
    return {"title": title, "ms": total_ms, "parts": [part for part in parts if part["ms"] > 0]}
