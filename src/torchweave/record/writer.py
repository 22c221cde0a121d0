"""Writes down what happens, as cheaply as Python can: columns that grow, places and names once each."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import cast

from torchweave.record.pairs import measured_pairs
from torchweave.record.tables import MadeStreams, Numbers, Tables
from torchweave.trace.log import IN_BACKWARD, OP, Log

# taken before anybody wraps it
now: Callable[[], int] = time.time_ns
# reads of one clock from one line that follow each other sooner are a loop that waits
_POLLING_NS = 50_000
_NOWHERE = ("", 0, "")


class Writer:
    """The log of one process while it grows.

    Attributes:
        tables: What was written; the same object until `fresh`.
        streams: Stream objects.
        on: Whether anything is written; read by everything that would write.
        backwards: Where the program called each `backward()` that is running: autograd's threads have no lines.
        seen: The system's numbers of the threads that wrote something.
    """

    def __init__(self) -> None:
        self.tables = Tables()
        self.streams = MadeStreams()
        self.on = False
        self.backwards: list[int] = []
        self.seen: set[int] = set()
        self._mine: dict[str, str | None] = {}
        self._places, self._names, self._operators = Numbers(), Numbers(), itertools.count()
        self._last_clock: dict[int, list[int]] = {}
        self._clock_files: dict[str, dict[int, int]] = {}
        self._timed: set[int] = set()
        self._here = _folder()
        self._library = _library_folders()

    def fresh(self) -> Log:
        """Begin a new log, with the same places, names and stream objects, and return the old one."""
        old, self.tables = self.tables, Tables()
        self._last_clock.clear()
        return self._log(old)

    @property
    def log(self) -> Log:
        """The log as it is now."""
        return self._log(self.tables)

    def _log(self, tables: Tables) -> Log:
        found = Log(streams=self.streams.table())
        tables.into(found)
        # last, so that they have what the rows name
        found.places = cast("list[tuple[str, int, str]]", self._places.in_order(_NOWHERE))
        found.names = cast("list[str]", self._names.in_order(""))
        return found

    def thread(self) -> int:
        """Return the system's number of this thread; Python's own numbers are used again by later threads."""
        number = threading.get_native_id()
        self.seen.add(number)
        return number

    def name(self, text: str) -> int:
        """Return the row of a name."""
        return self._names.of(text)

    def place(self, frame: FrameType | None) -> int:
        """Return the row of the innermost place of the program's own code, -1 for none."""
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            try:
                told = self._mine[file]
            except KeyError:
                told = self._mine[file] = self._told(file)
            if told is not None:
                return self._places.of((told, frame.f_lineno or code.co_firstlineno, code.co_name))
            frame = frame.f_back
        return -1

    def is_own(self, frame: FrameType) -> bool:
        """Return whether a frame is of the program's own code."""
        file = frame.f_code.co_filename
        if file not in self._mine:
            self._mine[file] = self._told(file)
        return self._mine[file] is not None

    def span(self, begin: int, place: int, name: int) -> None:
        """Write down a call that ends now."""
        self.tables.spans.extend((begin, now(), self.thread(), place, name))

    def event(self, kind: int, place: int, a: int = 0, b: int = 0, *, task: int = -1) -> None:
        """Write down what was asked of the device.

        Args:
            kind: What, as `Events` has it.
            place: Row of its place.
            a: As `Events` has it.
            b: As `Events` has it.
            task: Autograd's number of the backward that asked, -1 for none.
        """
        at, thread = now(), self.thread()
        within = (IN_BACKWARD, at, thread, place, task, 0) if task >= 0 else ()
        # by one call: no other thread's row comes between the two
        self.tables.events.extend((*within, kind, at, thread, place, a, b))

    def operator(self, name: int, place: int, memory: Sequence[int], stream: int, *, task: int = -1) -> None:
        """Write down an operator with the memory that it touched.

        Args:
            name: Row of its name.
            place: Row of its place.
            memory: For each tensor base, low, high and flags, as `Accesses` has them.
            stream: The stream that it was sent to.
            task: As of `event`.
        """
        number, tables = next(self._operators), self.tables
        # the event last: whoever reads it finds the rest
        rows = [value for at in range(0, len(memory), 4) for value in (number, *memory[at : at + 4])]
        tables.accesses.extend(rows)
        tables.operators.extend((number, name))
        self.event(OP, place, stream, number, task=task)

    def place_or_backward(self, frame: FrameType | None) -> int:
        """Return the row of a place; on a thread without lines, that of the running `backward()`."""
        row = self.place(frame)
        return row if row >= 0 or not self.backwards else self.backwards[-1]

    def clock(self, name: str, frame: FrameType) -> None:
        """Write down that the program read a host clock; a loop that polls one leaves its last read only."""
        if not self.is_own(frame):
            return
        place = self.place(frame)
        self._clock_files.setdefault(frame.f_code.co_filename, {})[frame.f_lineno or 0] = place
        self._read(name, place)

    def timed(self, name: str, place: int) -> None:
        """Write down one of two reads, before and after what a line of the program lets somebody else time."""
        if place >= 0:
            self._timed.add(place)
            self._read(name, place)

    def _read(self, name: str, place: int) -> None:
        at, thread = now(), self.thread()
        last = self._last_clock.get(thread)
        if last is not None and last[2] == place and at - last[0] < _POLLING_NS:
            last[0] = at
            return
        self._last_clock[thread] = row = [at, thread, place, self.name(name)]
        self.tables.clocks.append(row)

    def measured(self) -> list[tuple[int, int]]:
        """Return the places of clock reads that the program subtracts from each other."""
        pairs = [(place, place) for place in sorted(self._timed)]
        for file, lines in self._clock_files.items():
            pairs += measured_pairs("".join(linecache.getlines(file)), lines)
        return pairs

    def sample(self, thread: int, frame: FrameType) -> None:
        """Write down where a thread is."""
        place = self.place(frame)
        if place >= 0:
            self.tables.samples.extend((now(), thread, place, -1))

    def _told(self, file: str) -> str | None:
        """Return how a file of the program is told, None for a library's and for ours."""
        if file.startswith("<") and not file.startswith(("<stdin", "<ipython", "<string")):
            return None
        try:
            path = os.path.abspath(file)  # noqa: PTH100 (what was moved away since must not fail)
        except OSError:
            # a relative name, and the program has removed the folder that it is in
            return file
        if path.startswith(self._library):
            return None
        inside = os.path.relpath(path, self._here)
        return file if file.startswith("<") else path if inside.startswith("..") else inside


def _folder() -> Path:
    """Return the current folder; the root where it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return Path(os.sep)


def _library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library, of installed packages, of torch and of torchweave."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(__file__).parent.parent))
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        folders.add(str(Path(torch.__file__).parent))
    folders |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    # an interpreter of a virtual environment has its standard library elsewhere
    folders.add(str(Path(os.__file__).parent))
    # a path is compared as it stands, and with its links followed
    return tuple(f"{path}{os.sep}" for folder in folders for path in (folder, os.path.realpath(folder)))
