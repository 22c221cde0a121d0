"""IDEA: reading files as Python reads them, and finding them: folders, notebooks, links that go round."""

from __future__ import annotations

import io
import json
import os
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchweave.errors import UnreadableInputError

# folders that hold no code of the project's own
_SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages", ".git", ".hg", ".venv", "venv", ".tox", ".nox"))
NOTEBOOK = ".ipynb"


@dataclass(frozen=True, slots=True)
class Program:
    """One program's text.

    Attributes:
        name: Its file, as it was given.
        text: Python source.
        cells: For a notebook the first line of each code cell, and the cell's number among all cells, from 1.
    """

    name: str
    text: str
    cells: tuple[tuple[int, int], ...] = ()

    def place(self, line: int) -> tuple[str, int]:
        """Return what to name as the file, and the line in it: for a notebook the cell and the line in the cell."""
        inside = [cell for cell in self.cells if cell[0] <= line]
        if not inside:
            return self.name, line
        first, number = inside[-1]
        return f"{self.name}:cell {number}", line - first + 1


def read(path: Path) -> Program:
    """Return a file's program; a notebook's is that of its code cells, one after the other.

    Raises:
        UnreadableInputError: It cannot be read, or is not text.
    """
    return _notebook(path) if path.suffix == NOTEBOOK else Program(str(path), read_text(path))


def read_text(path: Path) -> str:
    """Return a Python file's text, by its byte order mark or its declared encoding (PEP 263).

    Raises:
        UnreadableInputError: It cannot be read, or is not text.
    """
    data = _bytes(path)
    if b"\0" in data:
        raise _not_text(path, "it holds NUL bytes")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except SyntaxError as error:
        raise _not_text(path, str(error.msg)) from error
    except (UnicodeError, LookupError) as error:
        raise _not_text(path, str(error)) from error
    return io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True)


def _bytes(path: Path) -> bytes:
    try:
        if not (path.is_file() or path.is_fifo()):
            raise OSError(2, _what_is(path))
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableInputError("A file to check has to be readable", given=f"{path}: {reason}") from error


def _what_is(path: Path) -> str:
    """Return why a path that is no file cannot be read."""
    if path.is_dir():
        return "Is a directory"
    if str(path) == "-":
        return "Standard input is not read; name a file, or /dev/stdin"
    if path.is_symlink():
        return "A link that leads to no file"
    return "A device or a socket" if path.exists() else os.strerror(2)


def _not_text(path: Path, reason: str) -> UnreadableInputError:
    return UnreadableInputError(
        "A file to check has to be Python source in the encoding that it declares",
        given=f"{path}: {reason}",
        remedy="give Python files, or leave this one out with `exclude`",
    )


def _notebook(path: Path) -> Program:
    try:
        cells = json.loads(_bytes(path))["cells"]
        sources = [(number, _source(cell)) for number, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _not_text(path, f"it is no notebook ({type(error).__name__}: {error})") from error
    lines: list[str] = []
    begins = []
    for number, source in sources:
        begins.append((len(lines) + 1, number))
        lines += _plain(source)
    return Program(str(path), "\n".join(lines) + "\n", tuple(begins))


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return "".join(source) if isinstance(source, list) else str(source)


def _plain(source: str) -> list[str]:
    """Return a cell's lines without what only a notebook understands; each keeps its line."""
    lines = source.splitlines()
    if lines and lines[0].startswith("%%"):
        return [""] * len(lines)
    return [_indent(line) + "pass" if line.lstrip().startswith(("%", "!", "?")) else line for line in lines]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def find(given: str, excluded: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the files that a word of a command line means: a file as it is, a folder by its Python files.

    Args:
        given: A file or folder.
        excluded: Whether a file found in a folder is left out.

    Raises:
        UnreadableInputError: A folder cannot be read, or holds none.
    """
    path = Path(given)
    if not path.is_dir():
        yield path
        return
    found = False
    for file in _inside(path, excluded, set()):
        found = True
        yield file
    if not found:
        raise UnreadableInputError(
            "A folder to check has to hold Python files", given=f"{path}: none", remedy="name the files or their folder"
        )


def _inside(folder: Path, excluded: Callable[[Path], bool], above: set[tuple[int, int] | str]) -> Iterator[Path]:
    """Yield a folder's files, by name; a link to a folder that this one is in is not followed."""
    here = identity(folder)
    if here in above:
        return
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise UnreadableInputError(
            "A folder to check has to be readable", given=f"{folder}: {error.strerror or error}"
        ) from error
    for path in inside:
        if path.is_dir():
            if path.name not in _SKIPPED and not path.name.startswith(".") and not excluded(path):
                yield from _inside(path, excluded, above | {here})
        elif path.suffix in (".py", NOTEBOOK) and not path.is_fifo() and not excluded(path):
            yield path


def identity(path: Path) -> tuple[int, int] | str:
    """Return what two names of one file or folder have in common."""
    try:
        status = path.stat()
    except OSError:
        return str(path)
    return (status.st_dev, status.st_ino)
