"""IDEA: from a file's text to its findings."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torchweave.errors import UnreadableInputError
from torchweave.source import ignore
from torchweave.source.entries import read_file
from torchweave.source.files import Program, read
from torchweave.source.finding import Finding
from torchweave.source.rules import NAMES, Found, all_rules

# a file without any of these words has nothing to find, and is not read any further
_WORDS = re.compile(r"cuda|CUDA_|[sS]tream|async_op|non_blocking|pin_memory")


_DEVICE = re.compile(r"cuda|nccl", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of one program.

    Attributes:
        findings: Its findings, by line, without those that comments take away.
        idle_comments: Lines of ignore comments that do nothing, with what is wrong.
    """

    findings: tuple[Finding, ...]
    idle_comments: tuple[tuple[int, str], ...]


def check_source(text: str, name: str = "<source>", *, causes: Iterable[str] = NAMES) -> tuple[Finding, ...]:
    """Return the findings of a program's text. It is never run.

    Args:
        text: Python source.
        name: What the findings name as their file.
        causes: The causes to look for.

    Returns:
        The findings, by line, without those that `# torchweave: ignore` takes away.

    Raises:
        UnreadableInputError: This Python cannot parse it.
    """
    return check_text(text, name, causes=causes).findings


def check_text(text: str, name: str = "<source>", *, causes: Iterable[str] = NAMES) -> Checked:
    """Return the findings of a program's text, and the comments in it that do nothing.

    Args:
        text: Python source.
        name: What the findings name as their file.
        causes: The causes to look for.

    Raises:
        UnreadableInputError: This Python cannot parse it.
    """
    wanted = frozenset(causes)
    tree = parse(text, name)
    ignores = ignore.comments(text)
    findings = _findings(tree, text, name, wanted) if _WORDS.search(text) else []
    if ignores:
        findings = ignore.without_ignored(findings, ignores, _statement_lines(tree))
    idle = ignore.idle(ignores, frozenset(NAMES), wanted)
    return Checked(tuple(findings), tuple(idle))


def _findings(tree: ast.Module, text: str, name: str, wanted: frozenset[str]) -> list[Finding]:
    facts = read_file(tree)
    facts.on_cpu = "gloo" in text and not _DEVICE.search(text)
    lines = text.split("\n")
    found: dict[tuple[int, int, str], Finding] = {}
    for rule in all_rules():
        if rule.cause in wanted:
            for one in rule.find(facts):
                finding = _finding(one, rule.cause, name, lines)
                key = (finding.line, finding.column, rule.cause)
                if key not in found or found[key].certainty == "likely":
                    found[key] = finding
    return sorted(found.values())


def _statement_lines(tree: ast.Module) -> dict[int, tuple[int, int]]:
    """Return the first and last line of the simple statement, or of the head of the compound one, that lines are in."""
    found: dict[int, tuple[int, int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
            for line in range(node.lineno, max(last, node.lineno) + 1):
                found[line] = (node.lineno, max(last, node.lineno))
    return found


def _finding(one: Found, cause: str, name: str, lines: list[str]) -> Finding:
    line = lines[one.node.lineno - 1] if one.node.lineno <= len(lines) else ""
    # ast counts bytes of UTF-8; people count characters
    column = len(line.encode("utf-8", "replace")[: one.node.col_offset].decode("utf-8", "replace")) + 1
    return Finding(name, one.node.lineno, column, cause, one.why, one.mend.rstrip("\n"), one.certainty)


def parse(text: str, name: str) -> ast.Module:
    """Return a program's syntax tree.

    Raises:
        UnreadableInputError: This Python cannot parse it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, name)
    except SyntaxError as error:
        given = f"{name}:{error.lineno or 1}: {error.msg}"
    except ValueError as error:
        given = f"{name}: {error}"
    except (RecursionError, MemoryError):
        given = f"{name}: nested too deeply for Python's parser"
    version = ".".join(map(str, sys.version_info[:2]))
    raise UnreadableInputError(
        f"A file to check has to be what Python {version} can parse",
        given=given,
        remedy="mend its syntax, or leave it out with `exclude`",
    )


def check_file(path: str | Path, *, causes: Iterable[str] = NAMES) -> tuple[Finding, ...]:
    """Return the findings of a file. It is read and never run.

    Args:
        path: A Python file or a notebook.
        causes: The causes to look for.

    Returns:
        The findings, by line, without those that `# torchweave: ignore` takes away.

    Raises:
        UnreadableInputError: It cannot be read, or this Python cannot parse it.
    """
    return check_program(read(Path(path)), causes=causes).findings


def check_program(program: Program, *, causes: Iterable[str] = NAMES) -> Checked:
    """Return the findings of a program that was read, and the comments in it that do nothing.

    Args:
        program: A file's program.
        causes: The causes to look for.

    Raises:
        UnreadableInputError: This Python cannot parse it.
    """
    found = check_text(program.text, program.name, causes=causes)
    if not program.cells:
        return found
    findings = []
    for one in found.findings:
        name, line = program.place(one.line)
        findings.append(replace(one, file=name, line=line))
    return Checked(tuple(findings), found.idle_comments)
