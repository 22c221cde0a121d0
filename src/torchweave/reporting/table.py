"""Several diagnoses as one table, and what a change did between two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchweave.diagnose.model import Diagnosis
from torchweave.reporting.lines import Line


def table(diagnoses: Sequence[Diagnosis]) -> list[Line]:
    """Return one line a diagnosis: file, rank, verdict, numbers, first cause."""
    head = ("file", "rank", "verdict", "span ms", "possible ms", "lost ms", "idle ms", "first cause")
    rows: list[tuple[str, ...]] = [head]
    for diagnosis in diagnoses:
        found = diagnosis.numbers
        rows.append(
            (
                Path(diagnosis.file).name,
                "-" if diagnosis.rank is None else str(diagnosis.rank),
                diagnosis.verdict,
                *(f"{value:.3f}" for value in (found.span_ms, found.possible_ms, found.lost_ms, found.idle_ms)),
                diagnosis.causes[0].cause if diagnosis.causes else "-",
            )
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[Line]:
    """Return rows as lines with aligned columns, numbers to the right; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    columns = [[row[column] for row in rows[1:] if row[column] != "-"] for column in range(len(rows[0]))]
    right = [bool(cells) and all(map(_is_number, cells)) for cells in columns]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append(Line("  ".join(cells).rstrip(), "bold" if number == 0 else ""))
    return lines


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).removesuffix("%").isdigit()
