"""IDEA: `[tool.torchweave]` in pyproject.toml: which causes to look for, and which files to leave out."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torchweave.errors import UsageError
from torchweave.source.rules import NAMES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = ("select", "ignore", "exclude")


@dataclass(frozen=True, slots=True)
class Settings:
    """What to look for, and where.

    Attributes:
        causes: The causes to look for.
        exclude: Patterns of files that are left out, relative to the folder of the settings.
        folder: That folder.
    """

    causes: frozenset[str] = frozenset(NAMES)
    exclude: tuple[str, ...] = ()
    folder: Path = Path()

    def excludes(self, path: Path) -> bool:
        """Return whether a file or folder is left out."""
        try:
            inside = path.resolve().relative_to(self.folder.resolve()).as_posix()
        except (ValueError, OSError):
            return False
        parts = inside.split("/")
        heads = ["/".join(parts[: length + 1]) for length in range(len(parts))]
        return any(fnmatch(name, pattern.rstrip("/")) for pattern in self.exclude for name in (*heads, *parts))


def settings_for(path: Path) -> Settings:
    """Return the settings of the nearest pyproject.toml that has a `[tool.torchweave]`, from a file upward.

    Raises:
        UsageError: They are not well formed.
    """
    start = path.resolve() if path.is_dir() else path.resolve().parent
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            table = _table(file)
            if table is not None:
                return _settings(table, file)
    return Settings()


def _table(file: Path) -> dict[str, Any] | None:
    try:
        whole = tomllib.loads(file.read_bytes().decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            "pyproject.toml has to be TOML", given=f"{file}: {error}", remedy="mend it, or check outside of its folder"
        ) from error
    tool = whole.get("tool")
    table = tool.get("torchweave") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError("[tool.torchweave] has to be a table", given=f"{file}: {type(table).__name__}")
    return table


def _settings(table: dict[str, Any], file: Path) -> Settings:
    for key, value in table.items():
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            remedy = f"did you mean `{close[0]}`?" if close else f"the keys are {', '.join(_KEYS)}"
            raise UsageError("[tool.torchweave] has to hold known keys", given=f"{file}: `{key}`", remedy=remedy)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UsageError(
                f"`{key}` in [tool.torchweave] has to be a list of strings",
                given=f"{file}: {value!r}",
                remedy=f'{key} = ["..."]',
            )
    selected = table.get("select", list(NAMES))
    causes = chosen(selected, table.get("ignore", []), where=str(file))
    return Settings(causes, tuple(table.get("exclude", ())), file.parent)


def chosen(selected: Iterable[str], ignored: Iterable[str], *, where: str) -> frozenset[str]:
    """Return the causes that are selected and not ignored.

    Args:
        selected: The causes to look for.
        ignored: Those of them not to.
        where: Where they were chosen, for errors.

    Raises:
        UsageError: There is no rule for one of them.
    """
    selected, ignored = list(selected), list(ignored)
    for cause in (*selected, *ignored):
        if cause not in NAMES:
            close = difflib.get_close_matches(cause, NAMES, n=1)
            remedy = f"did you mean `{close[0]}`?" if close else f"there are rules for {', '.join(NAMES)}"
            raise UsageError("A cause to check for has to have a rule", given=f"{where}: `{cause}`", remedy=remedy)
    return frozenset(selected) - frozenset(ignored)
