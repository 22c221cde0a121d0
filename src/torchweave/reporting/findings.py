"""IDEA: findings of the source as text, as JSON, and as annotations of a pull request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from torchweave.reporting.lines import Line, wrapped
from torchweave.source import Finding

SCHEMA = 1


def to_json(findings: Sequence[Finding]) -> str:
    """Return findings as JSON; its keys are fixed."""
    rows = [
        {
            "file": one.file,
            "line": one.line,
            "column": one.column,
            "cause": one.cause,
            "why": one.why,
            "mend": one.mend,
            "certainty": one.certainty,
        }
        for one in findings
    ]
    return json.dumps({"schema": SCHEMA, "findings": rows}, indent=1) + "\n"


def to_github(findings: Sequence[Finding]) -> str:
    """Return findings as workflow commands, which GitHub shows beside the lines of a pull request."""
    rows = []
    for one in findings:
        likely = ", likely" if one.certainty == "likely" else ""
        message = f"{one.why}\nMend:\n{one.mend}"
        path, cell, number = one.file.partition(":cell ")
        place = f"line={one.line},col={one.column}"
        if cell:
            # a notebook's file has other lines than its cells
            place, message = "line=1", f"Cell {number}, line {one.line}: {message}"
        title = _property(f"torchweave: {one.cause}{likely}")
        rows.append(f"::warning file={_property(path)},{place},title={title}::{_message(message)}")
    return "".join(row + "\n" for row in rows)


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def to_text(findings: Sequence[Finding], code: dict[tuple[str, int], str], width: int) -> list[Line]:
    """Return findings as lines, file by file.

    Args:
        findings: The findings, by file and line.
        code: The line of code of each, by file and line.
        width: Columns of the terminal.
    """
    lines: list[Line] = []
    for file, rows in groupby(findings, key=lambda one: one.file):
        for one in rows:
            likely = " (likely)" if one.certainty == "likely" else ""
            lines.append(Line(f"{file}:{one.line}:{one.column}: {one.cause}{likely}", "bold"))
            text = code.get((file, one.line), "").strip()
            lines += [Line(f"     {text[: max(20, width - 5)]}", "dim")] if text else []
            lines += wrapped(one.why, width, "   ")
            lines.append(Line("   Mend:"))
            lines += [Line(f"     {row}", "green") for row in one.mend.splitlines()]
            lines.append(Line(""))
    return lines
