"""IDEA: a plan as a csv file, a row a rank, which torch's `_load_csv` reads, and reading of what torch writes."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from torchweave.errors import UnreadableInputError, UsageError
from torchweave.schedule.action import Action
from torchweave.schedule.plan import Plan, placed


def to_csv(plan: Plan) -> str:
    """Return a plan as csv text.

    torch reads a plan of computing actions as its format `compute_only`, and one with point-to-point (and REDUCE_GRAD)
    as `compute_comms`. It has no schedule whose stages stand on two ranks, so it refuses a bidirectional one.

    Args:
        plan: Any plan.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[str(action) for action in row] for row in plan.ranks])
    return text.getvalue()


def from_csv(text: str, name: str) -> Plan:
    """Read a plan from csv text.

    Args:
        text: A row for each rank; empty cells (torch's idle slots) are left out.
        name: The plan's name, and what an error calls the text.

    Raises:
        UnreadableInputError: A cell is no action, or there is none at all.
    """
    rows = []
    for rank, cells in enumerate(csv.reader(io.StringIO(text, newline=""))):
        row = []
        for column, cell in enumerate(cells):
            if cell.strip():
                row.append(_action(cell, f"{name}, rank {rank} (row {rank + 1}), column {column + 1}"))
        rows.append(row)
    if not any(rows):
        raise UnreadableInputError(
            "A plan's file has a row for each rank and an action in each cell",
            given=f"{name}, without one",
            remedy="write one with torchweave plan NAME --csv FILE",
        )
    return placed(name, rows)


def read_csv(path: Path) -> Plan:
    """Read a plan from a csv file; its name is the file's.

    Args:
        path: The file.

    Raises:
        UnreadableInputError: It cannot be read, or holds no plan.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableInputError(
            "A plan is read from a csv file in UTF-8",
            given=f"{path}: {error.strerror if isinstance(error, OSError) else error}",
            remedy="write one with torchweave plan NAME --csv FILE",
        ) from error
    try:
        return from_csv(text, path.name)
    except csv.Error as error:
        raise UnreadableInputError(
            "A plan is read from a csv file", given=f"{path}: {error}", remedy="write a row for each rank"
        ) from error


def _action(cell: str, place: str) -> Action:
    try:
        return Action.parse(cell)
    except UsageError as error:
        raise UnreadableInputError(error.rule, given=f"{error.given} in {place}", remedy=error.remedy) from error
