"""IDEA: a report on a terminal is lines, each with a style."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a report.

    Attributes:
        text: Its characters.
        style: How a terminal shows it, in rich's words; empty for plain.
    """

    text: str
    style: str = ""


def plain(lines: Sequence[Line]) -> str:
    """Return a report as text without styles."""
    return "\n".join(line.text.rstrip() for line in lines) + "\n"


def wrapped(text: str, width: int, indent: str, style: str = "") -> list[Line]:
    """Return text as lines of at most a width, all with one indent."""
    rows = textwrap.wrap(text, max(40, width), initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    return [Line(row, style) for row in rows]
