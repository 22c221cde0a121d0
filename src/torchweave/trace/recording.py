"""A recording of a watched run: one zip file with the trace (Chrome JSON, gzip) and the log (JSON)."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from torchweave.errors import UnreadableInputError, UsageError
from torchweave.trace.kineto import read_kineto
from torchweave.trace.lines import with_log
from torchweave.trace.log import Log, decode, encode
from torchweave.trace.timeline import Timeline

MAGIC = b"PK\x03\x04"
ENDING = ".twr"
_TRACE, _LOG = "trace.json.gz", "log.json"


def write_recording(path: Path, trace: Path, log: Log) -> None:
    """Write a recording.

    Args:
        path: The file; one that exists is replaced.
        trace: The trace, Chrome JSON, gzip.
        log: What was written down beside it.

    Raises:
        UsageError: It cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        with zipfile.ZipFile(part, "w") as archive:
            # a trace is packed already; packing it twice gains nothing
            archive.write(trace, _TRACE, zipfile.ZIP_STORED)
            archive.writestr(_LOG, encode(log), zipfile.ZIP_DEFLATED)
        # whoever waits for the file sees all of it or nothing
        part.replace(path)
    except OSError as error:
        raise UsageError(
            "A recording has to go to a file that can be written",
            given=f"{path}: {error.strerror or error}",
            remedy="choose a folder that exists and that you may write to",
        ) from error


def is_recording(path: Path) -> bool:
    """Return whether a zip file is a recording."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {_TRACE, _LOG} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def read_recording(path: Path) -> Timeline:
    """Read a recording.

    Args:
        path: The file.

    Returns:
        The trace's tables, with the lines and the facts of the log.

    Raises:
        UnreadableInputError: It is damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / _TRACE
        try:
            with closing(zipfile.ZipFile(path)) as archive:
                log = decode(archive.read(_LOG), str(path))
                with archive.open(_TRACE) as packed, trace.open("wb") as file:
                    shutil.copyfileobj(packed, file)
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise UnreadableInputError(
                "A recording has to be whole",
                given=f"{path}: {error}",
                remedy="copy it again, or record it again",
            ) from error
        try:
            timeline = read_kineto(trace)
        except UnreadableInputError as error:
            given = error.given.replace(str(trace), f"{path}, {_TRACE} in it")
            raise type(error)(error.rule, given=given, remedy="record it again") from error
    return with_log(replace(timeline, file=str(path)), log)


@contextmanager
def as_trace(path: Path) -> Iterator[Path]:
    """Give the trace of a recording as a file of its own, and any other file as it is.

    Args:
        path: The file.
    """
    if not is_recording(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        yield Path(archive.extract(_TRACE, folder))
