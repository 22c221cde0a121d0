"""One piece of a trace file to typed events; one fallback for what the fast decoder refuses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchweave.errors import UnreadableInputError
from torchweave.trace.events import Document, Event
from torchweave.trace.pieces import BOUNDARY, Piece

_DOCUMENT = msgspec.json.Decoder(Document)
_EVENTS = msgspec.json.Decoder(list[Event])
_NOT_A_NUMBER = re.compile(r"(?<=[:\[,\s])-?(?:NaN|Infinity)(?=\s*[,}\]])")
_REPAIRED = "some text or numbers were not valid JSON or UTF-8 and were read as well as could be"


@dataclass(slots=True)
class Parsed:
    """What one piece held.

    Attributes:
        events: Its events.
        document: The metadata that lie in it; None in the middle of a file.
        warnings: What was wrong with it.
    """

    events: list[Event]
    document: Document | None = None
    warnings: list[str] = field(default_factory=list)


def parse(piece: Piece, file: str, *, bare_list: bool) -> Parsed:
    """Decode one piece.

    Args:
        piece: The piece.
        file: The file's name, for errors.
        bare_list: True where the file is a list of events without an object around it.

    Raises:
        UnreadableInputError: The piece is not JSON, or JSON that is no trace.
    """
    text, as_list = _close(piece, bare_list)
    try:
        return _fast(text, as_list)
    except msgspec.ValidationError:
        return _slow(text, as_list, piece, file)
    except msgspec.DecodeError as error:
        truncated = "truncated" in str(error)
    except RecursionError as error:
        raise _not_json(file, piece.offset, "nested too deeply") from error
    if piece.last and truncated:
        return _cut(piece, file, bare_list)
    return _slow(text, as_list, piece, file)


def is_bare_list(head: bytes) -> bool:
    """Return whether a file begins as a list of events."""
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def _close(piece: Piece, bare_list: bool) -> tuple[bytes, bool]:
    """Make a whole JSON value of a piece; also return whether it is a list."""
    text = piece.text.removeprefix(b"\xef\xbb\xbf") if piece.first else piece.text
    if not piece.first:
        text = (b"[" if bare_list or not piece.last else b'{"traceEvents":[') + text
    if not piece.last:
        text += b"]" if bare_list or not piece.first else b"]}"
    return text, bare_list or not (piece.first or piece.last)


def _fast(text: bytes, as_list: bool) -> Parsed:
    if as_list:
        return Parsed(_EVENTS.decode(text))
    document = _DOCUMENT.decode(text)
    events, document.events = document.events, []
    return Parsed(events, document)


def _slow(text: bytes, as_list: bool, piece: Piece, file: str) -> Parsed:
    """Decode what msgspec refuses: NaN, bad UTF-8, lone surrogates, values of unusual types."""
    clean = text.decode("utf-8", "replace")
    try:
        # most often that is all: other values than these can stay with the fast decoder
        parsed = _fast(_NOT_A_NUMBER.sub("null", clean).encode("utf-8"), as_list)
    except msgspec.MsgspecError:
        pass
    else:
        parsed.warnings.append(_REPAIRED)
        return parsed
    try:
        value = json.loads(clean)
    except json.JSONDecodeError as error:
        if piece.last and _at_end(error, clean):
            return _cut(piece, file, as_list)
        at = piece.offset + len(clean[: error.pos].encode("utf-8", "replace")) - _num_added(piece, as_list)
        raise _not_json(file, at, _what(error, clean)) from error
    except (RecursionError, ValueError) as error:
        raise _not_json(file, piece.offset, str(error)) from error
    rows = value if as_list else value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(rows, list):
        raise UnreadableInputError(
            "A trace has to hold a list of events, alone or as `traceEvents`",
            given=f"{file}: JSON {type(value).__name__} without one",
            remedy="give the file that `export_chrome_trace` wrote",
        )
    parsed = Parsed([], None if as_list else _metadata(value))
    skipped = 0
    for row in rows:
        event = _event(row)
        if event is None:
            skipped += 1
        else:
            parsed.events.append(event)
    parsed.warnings.append(_REPAIRED)
    if skipped:
        parsed.warnings.append(f"{skipped} of {len(rows)} rows were no events and were left out")
    return parsed


def _event(row: Any) -> Event | None:
    """Make an event of a decoded row, without its arguments where those are of no use."""
    if not isinstance(row, dict):
        return None
    if not isinstance(row.get("args"), dict):
        row = {key: value for key, value in row.items() if key != "args"}
    try:
        return msgspec.convert(row, Event, strict=False)
    except msgspec.ValidationError:
        return None


def _metadata(value: dict[str, Any]) -> Document:
    return msgspec.convert({key: item for key, item in value.items() if key != "traceEvents"}, Document)


def _cut(piece: Piece, file: str, bare_list: bool) -> Parsed:
    """Read the last piece of a file that ends early up to its last whole event."""
    ends = [match.start() + 1 for match in BOUNDARY.finditer(piece.text)]
    trimmed = piece.text.rstrip().rstrip(b",").rstrip()
    candidates = [len(trimmed)] if trimmed.endswith(b"}") else []
    for end in (*candidates, *reversed(ends[-2:])):
        shorter = Piece(piece.text[:end], piece.offset, piece.first, last=False)
        try:
            parsed = parse(shorter, file, bare_list=bare_list)
        except UnreadableInputError:
            continue
        parsed.warnings.append(
            f"the file ends early, in the middle of an event: read up to byte {piece.offset + end}; "
            "the rest of the recording is missing"
        )
        return parsed
    if not piece.first:
        return Parsed([], warnings=[f"the file ends early: read up to byte {piece.offset}"])
    raise _not_json(file, len(piece.text), "it ends here, before the first whole event")


def _at_end(error: json.JSONDecodeError, text: str) -> bool:
    return error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")


def _num_added(piece: Piece, as_list: bool) -> int:
    """Return how many bytes `_close` put before a piece."""
    if piece.first:
        return 0
    return 1 if as_list else len('{"traceEvents":[')


def _what(error: json.JSONDecodeError, text: str) -> str:
    near = text[error.pos : error.pos + 20].encode("ascii", "backslashreplace").decode()
    return f"{error.msg}, near {near!r}" if near else error.msg


def _not_json(file: str, at: int, what: str) -> UnreadableInputError:
    return UnreadableInputError(
        "A trace has to be JSON",
        given=f"{file}, byte {at}: {what}",
        remedy="export it again; a file that was still being written, or edited by hand, looks like this",
    )
