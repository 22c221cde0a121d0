"""The trace that a diagnosis came from, copied as it is with events of ours added, never in memory as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchweave.errors import UnreadableInputError
from torchweave.trace.parse import is_bare_list
from torchweave.trace.pieces import BOUNDARY, Piece, open_trace, pieces
from torchweave.trace.read import SQLITE_MAGIC

# Inside a JSON string their quotes would be escaped, so they can only be keys.
_EVENTS = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_BASE = re.compile(rb'(?<!\\)"baseTimeNanoseconds"\s*:\s*"?(-?\d+)')


@dataclass(frozen=True, slots=True)
class Source:
    """A Kineto trace on the disk.

    Attributes:
        path: The file, plain or gzip.
        base_ns: What its times are counted from, ns.
    """

    path: Path
    base_ns: int

    @staticmethod
    def of(path: Path) -> Source | None:
        """Return the trace of a file, None where that is no Chrome JSON.

        Raises:
            UnreadableInputError: The file cannot be read.
        """
        with open_trace(path) as file:
            if file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC:
                return None
        # the metadata lie before the events or behind them
        for piece in pieces(path):
            found = _BASE.search(piece.text) if piece.first or piece.last else None
            if found and int(found[1]):
                return Source(path, int(found[1]))
        return Source(path, 0)

    def with_events(self, events: bytes) -> Iterator[bytes]:
        """Yield the file's text with events added before its own.

        Args:
            events: JSON objects with commas between them.

        Raises:
            UnreadableInputError: The file holds no list of events.
        """
        bare_list = False
        for piece in pieces(self.path):
            text = piece.text
            if piece.first:
                bare_list = is_bare_list(text)
                at = self._list_begin(text, bare_list)
                yield text[:at].removeprefix(b"\xef\xbb\xbf") + b"\n" + events
                text = text[at:]
            if piece.last and not _is_whole(piece, bare_list):
                text = _up_to_last_event(text) + (b"]" if bare_list else b"]}")
            if not text.lstrip().startswith(b"]"):
                yield b",\n"
            yield text

    def _list_begin(self, text: bytes, bare_list: bool) -> int:
        """Return the place behind the bracket that opens the list of events."""
        if bare_list:
            return text.index(b"[") + 1
        match = _EVENTS.search(text)
        if match is None:
            raise UnreadableInputError(
                "A trace has to hold a list of events, alone or as `traceEvents`",
                given=f"{self.path}: none near its head",
            )
        return match.end()


def _is_whole(piece: Piece, bare_list: bool) -> bool:
    """Return whether a file's last piece ends as JSON ends; a recording that was cut does not."""
    text = piece.text.removeprefix(b"\xef\xbb\xbf") if piece.first else piece.text
    if not piece.first:
        text = (b"[" if bare_list else b'{"traceEvents":[') + text
    try:
        json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return True


def _up_to_last_event(text: bytes) -> bytes:
    """Return the text of a cut recording up to the end of its last whole event, as far as can be told."""
    trimmed, last = text.rstrip(b"\0 \t\r\n,"), None
    for last in BOUNDARY.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    try:
        json.loads(trimmed[last.end() if last else 0 :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return text[: last.start() + 1] if last else b""
    return trimmed
