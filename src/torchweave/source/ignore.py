"""IDEA: `# torchweave: ignore[cause]` comments: which findings they take away, and which of them take none."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchweave.source.finding import Finding

_COMMENT = re.compile(r"#\s*torchweave:\s*ignore\b\s*(?:\[(?P<causes>[^\]]*)\])?")


@dataclass(slots=True)
class Ignore:
    """One comment.

    Attributes:
        line: Its line.
        causes: The causes that it names; empty for all.
        used: Those that took a finding away.
    """

    line: int
    causes: tuple[str, ...]
    used: set[str] = field(default_factory=set)

    def takes(self, finding: Finding) -> bool:
        """Return whether it takes a finding away."""
        return not self.causes or finding.cause in self.causes


def comments(text: str) -> list[Ignore]:
    """Return the ignore comments of a program."""
    found: list[Ignore] = []
    if "torchweave:" not in text:
        return found
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                names = match["causes"]
                causes = tuple(name.strip() for name in names.split(",") if name.strip()) if names is not None else ()
                found.append(Ignore(token.start[0], causes))
    except (tokenize.TokenError, SyntaxError):
        pass  # ast has read it: what is missing is at most an end
    return found


def without_ignored(
    findings: Iterable[Finding], ignores: list[Ignore], lines: dict[int, tuple[int, int]]
) -> list[Finding]:
    """Return the findings that no comment takes away; the comments remember what they took.

    Args:
        findings: The findings of one program.
        ignores: Its comments.
        lines: The first and last line of the statement that each line is in: a comment counts for all of it.
    """
    left = []
    for finding in findings:
        first, last = lines.get(finding.line, (finding.line, finding.line))
        taking = [one for one in ignores if first <= one.line <= last and one.takes(finding)]
        for one in taking:
            one.used.add(finding.cause)
        if not taking:
            left.append(finding)
    return left


def idle(ignores: list[Ignore], known: frozenset[str], chosen: frozenset[str]) -> list[tuple[int, str]]:
    """Return the lines of comments that do nothing, with what is wrong.

    Args:
        ignores: The comments, after they were used.
        known: The causes that there are rules for.
        chosen: The causes that were looked for.
    """
    told = []
    for one in ignores:
        for cause in one.causes:
            if cause not in known:
                told.append((one.line, f"there is no rule for the cause `{cause}`"))
            elif cause in chosen and cause not in one.used:
                told.append((one.line, f"`{cause}` is not found here: the comment can go"))
        if not one.causes and not one.used and chosen == known:
            told.append((one.line, "nothing is found here: the comment can go"))
    return told
