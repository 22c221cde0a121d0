"""What a user gives as a trace: a file, or a pipe that can be read only once; everything else is refused in words."""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchweave.errors import UnreadableInputError


def unreadable(path: Path, error: OSError) -> UnreadableInputError:
    """Return the error to raise where the system refuses to read a path."""
    return UnreadableInputError(
        "A trace has to be a file that can be read",
        given=f"{path}: {error.strerror or error}",
        remedy="check the path and its permissions",
    )


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder.

    Raises:
        UnreadableInputError: The system does not say: no permission, a name too long.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise unreadable(path, error) from error


def is_pipe(path: Path) -> bool:
    """Return whether a path is a pipe, which can be read only once."""
    try:
        return path.is_fifo()
    except OSError:
        return False


@contextmanager
def as_file(path: Path) -> Iterator[Path]:
    """Give a file that can be read from its beginning several times: the file itself, or a copy of a pipe.

    Raises:
        UnreadableInputError: It is neither a file nor a pipe, or it cannot be read; with the path that was given.
    """
    copy: Path | None = None
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            yield path
            return
        if not stat.S_ISFIFO(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device or a socket"
            raise UnreadableInputError(
                "A trace has to be a file or a pipe", given=f"{path}: {what}", remedy="give the trace's own path"
            )
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "trace"
            with path.open("rb") as pipe, copy.open("wb") as file:
                shutil.copyfileobj(pipe, file)
            yield copy
    except UnreadableInputError as error:
        if copy is None or str(copy) not in error.given:
            raise
        # the user knows the pipe, not the copy
        raise type(error)(error.rule, given=error.given.replace(str(copy), str(path)), remedy=error.remedy) from error
    except OSError as error:
        raise unreadable(path, error) from error
