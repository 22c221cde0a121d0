"""A mend's text in its parts: sentences, and code that can be copied."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import dedent

_FENCE = re.compile(r"^\s*```")
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a mend.

    Attributes:
        text: Its lines, without the indentation that all share.
        code: True for code.
    """

    text: str
    code: bool


def parts(mend: str) -> tuple[Part, ...]:
    """Cut a mend into sentences and code.

    Args:
        mend: Text; lines between fences of three backticks, or indented by four spaces, are code.
    """
    rows: list[tuple[str, bool]] = []
    fenced = False
    for line in mend.expandtabs(4).splitlines():
        if _FENCE.match(line):
            fenced = not fenced
            rows.append(("", False))
        else:
            rows.append((line, fenced or line.startswith(_INDENT)))
    groups: list[tuple[bool, list[str]]] = []
    for row, (line, code) in enumerate(rows):
        # an empty line between two lines of code belongs to the code
        code = code or (not line.strip() and _code_around(rows, row))
        if not groups or groups[-1][0] != code:
            groups.append((code, []))
        groups[-1][1].append(line)
    texts = ((code, dedent("\n".join(lines)).strip("\n")) for code, lines in groups)
    return tuple(Part(text if code else " ".join(text.split()), code) for code, text in texts if text.strip())


def _code_around(rows: list[tuple[str, bool]], row: int) -> bool:
    before = next((code for line, code in reversed(rows[:row]) if line.strip()), False)
    after = next((code for line, code in rows[row + 1 :] if line.strip()), False)
    return before and after
