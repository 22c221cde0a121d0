"""Files that reports are written to."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from torchweave.errors import UsageError


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
        raise UsageError(
            "A report has to go to a file that can be written",
            given=f"{path}: {error.strerror or error}",
            remedy="choose a folder that exists and that you may write to",
        ) from error
