"""A trace file in pieces that end between two events, so that no file is ever in memory as a whole."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchweave.errors import UnreadableInputError
from torchweave.trace.given import unreadable

PIECE_BYTES = 1 << 22
_READ_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"

# Between two events. Inside a JSON string its quotes would be escaped, so it can only match between two objects.
BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|args|dur)"\s*:)')


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a trace file, cut between two events.

    Attributes:
        text: The bytes, without the comma at the cut.
        offset: Where it begins in the uncompressed file, bytes.
        first: True for the file's beginning.
        last: True for the file's end.
        cut: Why the file ends early, empty where it does not.
    """

    text: bytes
    offset: int
    first: bool
    last: bool
    cut: str = ""


def open_trace(path: Path) -> BinaryIO:
    """Open a file, or say in our words why not."""
    try:
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error


def pieces(path: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Yield a file, plain or gzip, in pieces of about `piece_bytes`.

    Raises:
        UnreadableInputError: The file cannot be opened, or its compression is broken at the very beginning.
    """
    pending, offset, first, cut = bytearray(), 0, True, ""
    for block in _blocks(path):
        if isinstance(block, str):
            cut = block
            break
        pending += block
        if len(pending) < piece_bytes:
            continue
        split = _last_boundary(pending)
        if split is None:
            continue
        end, begin = split
        yield Piece(bytes(memoryview(pending)[:end]), offset, first, last=False)
        del pending[:begin]
        offset, first = offset + begin, False
    yield Piece(bytes(pending), offset, first, last=True, cut=cut)


def _last_boundary(text: bytearray) -> tuple[int, int] | None:
    """Return the end of the last complete event and the begin of the next, looking near the end first."""
    for tail in (1 << 16, 1 << 20, len(text)):
        start = max(0, len(text) - tail)
        match = None
        for match in BOUNDARY.finditer(text, start):  # noqa: B007 (the last one is wanted)
            pass
        if match is not None:
            return match.start() + 1, match.end()
    return None


def _blocks(path: Path) -> Iterator[bytes | str]:
    """Yield the uncompressed bytes; a string says why they end early."""
    with open_trace(path) as file:
        head = file.read(2)
        if head != _GZIP_MAGIC:
            yield head
            while block := file.read(_READ_BYTES):
                yield block
            return
        yield from _gzip_blocks(file, head, path)


def _gzip_blocks(file: BinaryIO, head: bytes, path: Path) -> Iterator[bytes | str]:
    """Yield what a gzip file holds, member after member, up to where it is broken."""
    inflate, data, num_out, inside = zlib.decompressobj(31), head, 0, False
    while data := data + file.read(_READ_BYTES // 4):
        try:
            block = inflate.decompress(data)
        except zlib.error as error:
            if num_out == 0:
                at = f"{path}: {error}, within the first {file.tell()} bytes"
                raise UnreadableInputError(
                    "A .gz file has to be gzip", given=at, remedy="copy it again, or record it again"
                ) from error
            yield f"its compression is broken after {num_out} uncompressed bytes ({error})"
            return
        num_out += len(block)
        if block:
            yield block
        data, inside = b"", True
        if inflate.eof:
            # another member may follow; padding with zeros may too
            data, inflate, inside = inflate.unused_data.lstrip(b"\0"), zlib.decompressobj(31), False
    if inside:
        yield f"its compressed data end early, after {num_out} uncompressed bytes"
