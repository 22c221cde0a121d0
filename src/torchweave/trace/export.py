"""An SQLite export with columns by name and texts as codes."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchweave.trace.timeline import Ints


class Export:
    """An open export: its tables, and names given codes as they appear."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        _refuse_cut(path)
        # names in a recording can hold bytes that are no UTF-8
        self.base.text_factory = _text
        tables = self.base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {name for (name,) in tables}
        self.codes: dict[str, int] = {}
        self.strings: dict[Any, str] = {}
        if "StringIds" in self.tables:
            rows = self.base.execute("SELECT id, value FROM StringIds")
            self.strings = {number: _text(value) for number, value in rows}

    def columns(self, table: str, wanted: Sequence[str], *, default: int = -1) -> dict[str, Ints]:
        """Return columns of a table as int64; what is missing or null becomes the default."""
        if table not in self.tables:
            return {name: np.zeros(0, dtype=np.int64) for name in wanted}
        known = {row[1] for row in self.base.execute(f"PRAGMA table_info({table})")}
        chosen = [f"IFNULL({name}, {default})" if name in known else str(default) for name in wanted]
        # the names come from this module and the export's own list of columns, never from the user
        rows = self.base.execute(f"SELECT {', '.join(chosen)} FROM {table}").fetchall()  # noqa: S608
        table_of = np.array(rows, dtype=np.int64).reshape(-1, len(wanted))
        return {name: table_of[:, column] for column, name in enumerate(wanted)}

    def names(self, ids: Ints) -> Ints:
        """Return codes for strings of the export."""
        return self.code([self.strings.get(number, str(number)) for number in ids.tolist()])

    def labels(self, table: str, usual: Mapping[int, str]) -> Mapping[int, str]:
        """Return what the numbers of an enumeration mean: as the export says, else as its versions so far do."""
        if table not in self.tables:
            return usual
        known = {row[1] for row in self.base.execute(f"PRAGMA table_info({table})")}
        if not {"id", "label"} <= known:
            return usual
        rows = self.base.execute(f"SELECT id, label FROM {table}")  # noqa: S608 (the names are ours)
        return {number: _text(label) for number, label in rows if isinstance(number, int)}

    def code(self, texts: Sequence[str]) -> Ints:
        """Return codes for texts."""
        codes = self.codes
        return np.array([codes.setdefault(text, len(codes)) for text in texts], dtype=np.int64)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _refuse_cut(path: Path) -> None:
    """Refuse a file that is shorter than its own header says: SQLite itself reads what there is.

    Source: SQLite, "Database File Format", 1.3: bytes 16 and 17 hold the size of a page, 28 to 31 their number.
    """
    with path.open("rb") as file:
        head = file.read(32)
    page = int.from_bytes(head[16:18], "big")
    wanted = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
    size = path.stat().st_size
    if len(head) < 32 or size < wanted:
        raise ValueError(f"the file ends early: {size} bytes of {wanted}")
