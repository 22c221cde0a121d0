"""Files that reports are written to."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from torchweave.errors import UsageError


def check_output(path: Path) -> None:
    """Refuse a file that could not be written, before the work whose report goes there.

    Args:
        path: The file; it is left as it is.

    Raises:
        UsageError: It cannot be written.
    """
    folder = path.parent
    if path.is_dir():
        problem = errno.EISDIR
    elif not folder.is_dir():
        problem = errno.ENOTDIR if folder.exists() else errno.ENOENT
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = errno.EACCES
    else:
        return
    raise _refusal(path, os.strerror(problem))


@contextmanager
def open_output(path: str | Path) -> Iterator[BinaryIO]:
    """Open a report's file for writing, compressed where its name ends in `.gz`.

    Args:
        path: The file; one that exists is replaced.

    Raises:
        UsageError: It cannot be written.
    """
    path = Path(path)
    try:
        with path.open("wb") as file:
            if path.suffix != ".gz":
                yield file
                return
            # without the time of writing, so that equal reports are equal files
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=5) as packed:
                yield cast(BinaryIO, packed)
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error


def _refusal(path: Path, problem: str) -> UsageError:
    return UsageError(
        "A report has to go to a file that can be written",
        given=f"{path}: {problem}",
        remedy="choose a folder that exists and that you may write to",
    )
