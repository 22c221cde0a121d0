"""Read a trace of any format that torchweave knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torchweave.errors import UnreadableInputError
from torchweave.trace.given import as_file
from torchweave.trace.kineto import read_kineto
from torchweave.trace.pieces import open_trace
from torchweave.trace.recording import MAGIC, is_recording, read_recording
from torchweave.trace.timeline import Timeline

SQLITE_MAGIC = b"SQLite format 3\0"
_DATABASES = (".sqlite", ".sqlite3", ".db")
# what people give by mistake, by its first bytes
_OTHERS = (
    (b"PK\x03\x04", "a zip archive (a checkpoint or a wheel?)"),
    (b"\x80\x02", "a pickle (a memory snapshot or a checkpoint?)"),
    (b"\x80\x04", "a pickle (a memory snapshot or a checkpoint?)"),
    (b"\x7fELF", "a program"),
    (b"<", "HTML or XML"),
    (b"\x28\xb5\x2f\xfd", "zstd data: unpack it first"),
    (b"QDSTRM", "an unfinished Nsight Systems recording"),
    (b"NSYS", "an Nsight Systems report: export it with `nsys export --type sqlite`"),
)


def read(path: str | Path, *, host_only: bool = False) -> Timeline:
    """Read one trace file.

    Args:
        path: Kineto Chrome JSON, plain or gzip, an Nsight Systems `.sqlite` export, or the recording of a watched
            run; a pipe is read once.
        host_only: Whether a trace without device work will do.

    Returns:
        The trace's tables, joined.

    Raises:
        UnreadableInputError: The file is missing, damaged, empty, of another kind, or holds no device work, unless that
            will do.
    """
    path = Path(path)
    with as_file(path) as file:
        timeline = _read(file)
    if len(timeline.work) == 0 and not host_only:
        raise UnreadableInputError(
            "A trace has to hold device work (kernels or copies)",
            given=f"{path}: {len(timeline.ops)} operators, {len(timeline.annotations)} annotations and "
            f"{len(timeline.calls)} runtime calls of the host, and no GPU work"
            + "".join(f"; {warning}" for warning in timeline.warnings),
            remedy="record with ProfilerActivity.CUDA on a machine whose GPU the program uses"
            + (", and copy the whole file: this one was damaged" if timeline.warnings else ""),
        )
    return timeline if file == path else replace(timeline, file=str(path))


def _read(path: Path) -> Timeline:
    with open_trace(path) as file:
        head = file.read(16)
    if not head:
        raise UnreadableInputError(
            "A trace must not be empty",
            given=f"{path}: 0 bytes",
            remedy="export it again, after the profiler has stopped",
        )
    if head.startswith(SQLITE_MAGIC):
        from torchweave.trace.nsys import read_nsys

        return read_nsys(path)
    if head.startswith(MAGIC) and is_recording(path):
        return read_recording(path)
    for magic, what in _OTHERS:
        if head.startswith(magic):
            raise UnreadableInputError(
                "A trace has to be Chrome JSON or an nsys .sqlite export",
                given=f"{path}: {what}",
                remedy="give the file that `export_chrome_trace` or `nsys export --type sqlite` wrote",
            )
    if path.suffix in _DATABASES:
        raise UnreadableInputError(
            f"A {path.suffix} file has to be an SQLite database",
            given=f"{path} begins with {head!r}",
            remedy="export it again with `nsys export --type sqlite`",
        )
    return read_kineto(path)
