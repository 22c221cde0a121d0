"""Writes down what happens, as cheaply as Python can: columns that grow, places and names once each."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from torchweave.record.pairs import measured_pairs
from torchweave.trace.log import Log

# taken before anybody wraps it
now: Callable[[], int] = time.time_ns
# reads of one clock from one line that follow each other sooner are a loop that waits
_POLLING_NS = 50_000


class Writer:
    """The log of one process while it grows.

    Attributes:
        log: What was written; the same object until `fresh`.
        on: Whether anything is written; read by everything that would write.
        backwards: Where the program called each `backward()` that is running: autograd's threads have no lines.
        seen: The system's numbers of the threads that wrote something.
    """

    def __init__(self) -> None:
        self.log = Log()
        self.on = False
        self.backwards: list[int] = []
        self.seen: set[int] = set()
        self._mine: dict[str, str | None] = {}
        self._places: dict[tuple[str, int, str], int] = {}
        self._names: dict[str, int] = {}
        self._last_clock: dict[int, int] = {}
        self._clock_files: dict[str, dict[int, int]] = {}
        self._timed: set[int] = set()
        self._here = Path.cwd()
        self._library = _library_folders()

    def fresh(self) -> Log:
        """Begin a new log, with the same places, names and stream objects, and return the old one."""
        old = self.log
        self.log = Log(places=list(old.places), names=list(old.names), streams=old.streams)
        self._last_clock.clear()
        return old

    def thread(self) -> int:
        """Return the system's number of this thread; Python's own numbers are used again by later threads."""
        number = threading.get_native_id()
        self.seen.add(number)
        return number

    def name(self, text: str) -> int:
        """Return the row of a name."""
        row = self._names.get(text)
        if row is None:
            row = self._names[text] = len(self.log.names)
            self.log.names.append(text)
        return row

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
                key = (told, frame.f_lineno or code.co_firstlineno, code.co_name)
                row = self._places.get(key)
                if row is None:
                    row = self._places[key] = len(self.log.places)
                    self.log.places.append(key)
                return row
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
        spans = self.log.spans
        spans.begin.append(begin)
        spans.end.append(now())
        spans.thread.append(self.thread())
        spans.place.append(place)
        spans.name.append(name)

    def event(self, kind: int, place: int, a: int = 0, b: int = 0) -> None:
        """Write down what was asked of the device."""
        events = self.log.events
        events.kind.append(kind)
        events.at.append(now())
        events.thread.append(self.thread())
        events.place.append(place)
        events.a.append(a)
        events.b.append(b)

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
        clocks, last = self.log.clocks, self._last_clock.get(thread, -1)
        self._last_clock[thread] = len(clocks.at)
        if last >= 0 and clocks.place[last] == place and at - clocks.at[last] < _POLLING_NS:
            clocks.at[last] = at
            self._last_clock[thread] = last
            return
        clocks.at.append(at)
        clocks.thread.append(thread)
        clocks.place.append(place)
        clocks.name.append(self.name(name))

    def measured(self) -> list[tuple[int, int]]:
        """Return the places of clock reads that the program subtracts from each other."""
        pairs = [(place, place) for place in sorted(self._timed)]
        for file, lines in self._clock_files.items():
            pairs += measured_pairs("".join(linecache.getlines(file)), lines)
        return pairs

    def sample(self, thread: int, frame: FrameType) -> None:
        """Write down where a thread is."""
        place = self.place(frame)
        if place < 0:
            return
        samples = self.log.samples
        samples.at.append(now())
        samples.thread.append(thread)
        samples.place.append(place)
        samples.name.append(-1)

    def _told(self, file: str) -> str | None:
        """Return how a file of the program is told, None for a library's and for ours."""
        if file.startswith("<") and not file.startswith(("<stdin", "<ipython", "<string")):
            return None
        path = os.path.abspath(file)  # noqa: PTH100 (what was moved away since must not fail)
        if path.startswith(self._library):
            return None
        inside = os.path.relpath(path, self._here)
        return file if file.startswith("<") else path if inside.startswith("..") else inside


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
