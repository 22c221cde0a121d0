"""One watched run: starts and stops the profiler and the log by the program's steps, and hands over what they hold."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchweave.errors import UsageError
from torchweave.record.collector import Collector
from torchweave.record.device import Device, Trace, environment
from torchweave.record.dispatch import OnThreads, Operators
from torchweave.record.functions import Functions
from torchweave.record.marks import SEAT
from torchweave.record.order import Handed, patch_order
from torchweave.record.patches import Patches, patch_all
from torchweave.record.phases import Phase, Phases
from torchweave.record.sampler import Sampler, compiles
from torchweave.record.scopes import Scopes, before_other_profilers, is_profiling
from torchweave.record.writer import Writer
from torchweave.trace.log import Flow, Log, Steps
from torchweave.trace.recording import write_recording

# taken before anybody wraps it
_seconds: Callable[[], float] = time.perf_counter
MOST_ENTRIES = 200_000
_TRACE = "trace.json.gz"
_CALIBRATION, _TRIES = 100, 5


@dataclass
class Recording:
    """What a watched run left.

    Attributes:
        trace: The profiler's part; it can be written only once, so what it wrote is kept.
        log: Ours.
    """

    trace: Trace
    log: Log
    _file: Path | None = None

    def save(self, path: Path) -> None:
        """Write it to a file.

        Raises:
            UsageError: The file cannot be written.
        """
        if self._file is None:
            folder = Path(tempfile.mkdtemp(prefix="torchweave-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self.trace.export(folder / _TRACE)
            self._file = folder / _TRACE
        write_recording(path, self._file, self.log)


class Session:
    """Watches this process from `begin` to `end`.

    Args:
        device: The device.
        phases: Which steps to watch; None watches everything, whatever steps are marked.
        most: So many entries of the log end the recording.
    """

    def __init__(self, device: Device, phases: Phases | None = None, *, most: int = MOST_ENTRIES) -> None:
        self._device, self._phases = device, phases
        self._writer = Writer()
        self._handed = Handed()
        self._mode = Operators(
            self._writer, device.on_device, device.current_stream,
            handed=self._handed, most=most, enough=self._enough,
        )  # fmt: skip
        self._operators = OnThreads(self._mode)
        self._functions = OnThreads(Functions(self._writer, most=most, enough=self._enough))
        self._modes = _Both(self._operators, self._functions)
        self._collector = Collector(self._writer)
        self._patches, self._sampler, self._scopes = Patches(), Sampler(self._writer), Scopes()
        self._steps, self._notes = Steps(), list[str]()
        self._counters: dict[str, int] = {}
        self._start: Recording | None = None
        self._watched: Recording | None = None
        self._recording = False
        self._owner, self._process = threading.get_ident(), os.getpid()
        self._starting = self._gave_way = self._full = False
        self._step_at = self._group_at = 0.0
        self._optimizer: Any = None
        self._told = False
        self._num_watched = 0
        self._most, self._entry_us = most, 0.0
        self._undo = ExitStack()

    def begin(self) -> None:
        """Start watching.

        Raises:
            UsageError: The process is being watched already, or a profiler runs.
        """
        if SEAT.watcher is not None:
            raise UsageError(
                "A process is watched by one at a time",
                given="a watch inside another one",
                remedy="end the outer `torchweave.watch()` first, or run the script without `torchweave why`",
            )
        if is_profiling():
            raise UsageError(
                "A process has one profiler at a time",
                given="a watch inside a block that torch's profiler records",
                remedy="take the profiler out, or read its trace by `torchweave why TRACE`",
            )
        SEAT.watcher = self
        self._undo.callback(setattr, SEAT, "watcher", None)
        try:
            self._put_in_place()
            if self._phases is None or self._phases.skip != 1:
                # with one step to leave out there is no step between two recordings
                self._record()
        except BaseException:
            self._undo.close()
            raise
        self._step_at = self._group_at = _seconds()

    def end(self, error: str = "") -> Recording | None:
        """Stop watching.

        Args:
            error: How the program ended, if with an exception.

        Returns:
            What was recorded; None where the device was never reached.
        """
        if os.getpid() != self._process:
            # a forked child: the profiler and the recording are its parent's
            self._undo.close()
            return None
        try:
            if self._recording:
                self._stop(whole=False)
        finally:
            self._writer.on = False
            self._undo.close()
        found = self._watched if self._watched is not None else self._start
        if found is not None:
            found.log.steps = self._steps
            found.log.notes = [*self._notes, self._by_steps(found)]
            found.log.error = error
            found.log.entry_us, found.log.measured = self._entry_us, self._writer.measured()
            found.log.about, found.log.others = self._device.about(), self._device.others()
        return found

    def forget(self) -> None:
        """Watch no more, in a forked child: its device and its profiler are its parent's."""
        self._writer.on = self._recording = False
        if SEAT.watcher is self:
            SEAT.watcher = None

    def _put_in_place(self) -> None:
        """Put everything in place that writes; each is undone in the end, also where a later one fails."""
        undo = self._undo.callback
        self._entry_us = _entry_us()
        undo(self._sampler.end)
        self._sampler.begin()
        undo(self._patches.restore)
        # before what writes lines: that is of the outermost calls only
        patch_order(self._patches, self._writer, self._device.current_streams, self._handed)
        patch_all(self._patches, self._writer, self._modes)
        self._scopes.put(self._patches)
        before_other_profilers(self._patches, self._give_way)
        self._collector.begin()
        undo(self._collector.end)
        undo(register_optimizer_step_post_hook(self._optimizer_stepped).remove)
        forget = weakref.ref(self)
        # a forked child writes nothing: its log would be lost
        os.register_at_fork(after_in_child=lambda: _switch_off(forget))
        undo(self._modes.leave)

    def step(self) -> None:
        """Take note that a step has ended: the program says so itself."""
        if not self._told and self._optimizer is not None and self._phases is not None:
            # an optimizer's steps were counted, which can be several of the program's: begin again
            self._begin_again(self._phases)
        self._told = True
        self._stepped()

    def _begin_again(self, phases: Phases) -> None:
        skip = phases.skip
        if self._recording:
            self._stop(whole=False)
            # no profiler is started where one was stopped: see `_stepped`
            skip = None if skip is None else max(skip, 2)
        self._phases = Phases(skip if skip != 0 else 1, phases.steps)
        # what there is of the beginning stays, in case that nothing follows
        self._start, self._watched = self._start or self._watched, None
        self._steps, self._num_watched = Steps(), 0

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        """Take note of an optimizer's step: of the first optimizer, and where the program says nothing itself."""
        if self._told or SEAT.watcher is not self:
            return
        known = self._optimizer() if self._optimizer is not None else None
        if known is None:
            self._optimizer = weakref.ref(optimizer)
        elif known is not optimizer:
            return
        self._stepped()

    def _stepped(self) -> None:
        phases = self._phases
        if phases is None or phases.phase == "over":
            return
        at = _seconds()
        old = phases.phase
        new = phases.step((at - self._step_at) * 1e3)
        self._num_watched += old == "watched"
        if new != old:
            self._change(old, new)
        elif self._recording and old == "start":
            # There are steps, so the program's beginning is enough. To stop here and start at a later step matters: a
            # mark lies inside scopes of the profiler (an optimizer's step is one), and torch writes the end of a
            # scope that began under one profiler into memory that is gone, if another one runs by then.
            self._stop(whole=True)
        self._step_at = _seconds()

    def _change(self, old: Phase, new: Phase) -> None:
        """Go from one group of steps to another: the device is idle at both ends of those that are timed."""
        assert self._phases is not None
        self._device.synchronize()
        if old not in ("start", "flow"):
            self._steps.watched.append(int(old == "watched"))
            self._steps.count.append(self._phases.steps)
            self._steps.ms.append((_seconds() - self._group_at) * 1e3)
        if old == "flow":
            self._stop_following()
        if self._recording:
            self._stop(whole=True)
        if new == "watched":
            self._record()
        if new == "flow":
            self._follow()
        self._group_at = _seconds()

    def _record(self) -> None:
        self._writer.fresh()
        self._counters = self._device.counters()
        self._starting = True
        try:
            self._device.begin_trace()
        finally:
            self._starting = False
        self._scopes.begin_again()
        self._full = False
        # with steps there is another one for what needs every operator; compiled code must not see the cheaper mode
        every = self._phases is None or self._phases.phase == "start" or compiles()
        self._modes.choose(every_operator=every)
        self._modes.enter()
        self._recording = self._writer.on = True

    def _follow(self) -> None:
        """Begin to follow the memory of a step, without the profiler."""
        self._writer.fresh()
        self._modes.choose(every_operator=True)
        self._modes.enter()
        self._writer.on = True

    def _stop_following(self) -> None:
        self._writer.on = False
        self._modes.leave()
        log = self._writer.fresh()
        if self._watched is not None:
            self._watched.log.flow = Flow(log.events, log.operators, log.accesses)
            # what the step was first to name, too
            self._watched.log.places, self._watched.log.names = log.places, log.names

    def _stop(self, *, whole: bool) -> None:
        """Stop recording, and keep what it holds if it is better than what there is."""
        self._writer.on = self._recording = False
        self._modes.leave()
        self._scopes.end()
        trace = self._device.end_trace()
        log = self._writer.fresh()
        log.anchors, log.environment = trace.anchors, environment()
        grown = self._device.counters()
        log.allocator = {name: value - self._counters.get(name, 0) for name, value in grown.items()}
        found = Recording(trace, log)
        if self._phases is None or self._num_watched == 0:
            # of steps that ended before one was whole there may be next to nothing
            self._start = self._start or found
        elif whole or self._watched is None:
            self._watched, self._start = found, None

    def _give_way(self, frame: FrameType) -> None:
        """End the watch where the program starts a profiler of its own: a process has one."""
        if self._starting or self._gave_way or SEAT.watcher is not self:
            return
        row = self._writer.place(frame)
        place = self._writer.log.told(row)
        if self._recording and threading.get_ident() != self._owner:
            raise UsageError(
                "A process has one profiler at a time",
                given=f"a thread that starts torch's profiler at {place}, in a program that is watched",
                remedy="take the profiler out, or read its trace by `torchweave why TRACE`",
            )
        self._gave_way = True
        if self._recording:
            self._stop(whole=False)
        elif self._phases is not None and self._phases.phase == "flow":
            self._stop_following()
        if self._phases is not None:
            self._phases.end()
        self._notes.append(
            f"The program starts torch's profiler itself ({place}), and a process has one at a time: nothing was "
            "watched from there on. Take it out, or read the trace that it writes by `torchweave why TRACE`."
        )

    def _enough(self) -> None:
        """End a recording that has become too long."""
        if not self._recording or self._full:
            return
        if threading.get_ident() == self._owner:
            self._stop(whole=False)
        else:
            # the profiler belongs to the thread that began it, which may do nothing but wait for this one
            self._writer.on, self._full = False, True
        if self._phases is None or self._phases.phase == "start":
            self._notes.append(
                f"The recording was ended after {self._most} entries, before the program was: give "
                "`--skip N --steps N` to choose steps."
            )

    def _by_steps(self, found: Recording) -> str:
        """Say which part of the program was watched."""
        phases = self._phases
        if phases is None:
            return ""
        if found is self._watched:
            first = phases.first_watched
            chosen = (
                "as asked" if phases.skip is not None else "the steps before were warm-up: their times had to settle"
            )
            last = first + self._num_watched - 1
            text = f"steps {first} to {last} were" if last > first else f"step {first} was"
            flow = "" if found.log.flow else " The program ended before one more could be followed for races."
            return f"Of the program's steps, counted from 0, {text} watched ({chosen}).{flow}"
        if phases.num_done:
            return (
                f"The program ended after {phases.num_done} steps, before its warm-up was over: its beginning was "
                "recorded, up to the first step's end. `--skip 0` watches the first steps."
            )
        return (
            "The program marks no steps: everything was recorded, its warm-up too. `torchweave.step()` at the end of "
            "each step, or an optimizer, lets the warm-up be left out."
        )


class _Both:
    """The two ways of seeing the program's calls, one at a time.

    Args:
        operators: Sees every operator.
        functions: Sees the program's calls alone.
    """

    def __init__(self, operators: OnThreads, functions: OnThreads) -> None:
        self._operators, self._functions = operators, functions
        self._chosen = operators

    def choose(self, *, every_operator: bool) -> None:
        """Say which one threads get from now on."""
        self._chosen = self._operators if every_operator else self._functions

    def enter(self) -> None:
        """Put the chosen one on this thread."""
        self._chosen.enter()

    def leave(self) -> None:
        """Take off this thread what lies on it."""
        self._operators.leave()
        self._functions.leave()


def _entry_us() -> float:
    """Return what writing one operator down costs, us: the same operator with and without, the least time of each."""
    numbers, writer = torch.zeros(1), Writer()
    plain, watched = [], []
    modes = OnThreads(Operators(writer, lambda _: True, lambda _: 0))
    writer.on = True
    for _ in range(_TRIES):
        plain.append(_time_of(numbers))
        modes.enter()
        try:
            watched.append(_time_of(numbers))
        finally:
            modes.leave()
    # other processes only ever make a try longer
    return max(min(watched) - min(plain), 0.0) / _CALIBRATION * 1e6


def _time_of(numbers: torch.Tensor) -> float:
    begin = _seconds()
    for _ in range(_CALIBRATION):
        numbers.add_(1)
    return _seconds() - begin


def _switch_off(session: weakref.ref[Session]) -> None:
    alive = session()
    if alive is not None:
        alive.forget()
