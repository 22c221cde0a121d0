"""IDEA: one side of a pair while it runs: what it met so far, and what it must meet next.

A strand is told of every operation that it issues and of every wait. It writes them down (first pair of a kind) or
compares them with the record, and asks its `Conduct` when it may issue and whether to let the other strand go on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchweave.engine import reads
from torchweave.engine.channels import Channel
from torchweave.engine.later import Later
from torchweave.engine.order import REGION, WAIT, Record, Step
from torchweave.engine.state import Shared
from torchweave.errors import BrokenGroupError, DeviationError, NotWeavableError

if TYPE_CHECKING:
    from torchweave.engine.conduct import Conduct

# a strand's own state while it waits for its turn: the process's, and that of modules that remember their pass
Saved: TypeAlias = tuple[Shared, tuple[Any, ...]]

# the ordinal of a wait for something that this strand did not issue
_ELSEWHERE = -1
# marks Works of groups of one: waiting for them hides nothing
_QUIET = -2


class Strand:
    """The forward or the backward of a pair.

    Args:
        name: `forward` or `backward`.
        conduct: Decides who may go on.
        expected: The record to follow, or None to write one.
    """

    def __init__(self, name: str, conduct: Conduct, expected: Record | None) -> None:
        self.name, self.conduct = name, conduct
        self.other: Strand = self
        self.expected = expected
        self.met: list[Step] = []
        self.position = 0
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.saved: Saved | None = None
        self.final: Saved | None = None
        self.in_region = False
        # a backward's weight gradients that wait for the next communication to start; None where none may
        self.later: Later | None = None
        # the strand's callable: an error that no line of the user's own led to says where that is defined
        self.call: Callable[[], Any] | None = None
        # while a backend runs one of our calls, what it calls in turn is its own business
        self.inside = False
        # a strand that left its record goes no further, whatever its code does with the error
        self._refused: DeviationError | None = None
        self._num_issued = 0
        self._works: dict[int, tuple[Any, int]] = {}
        self._tensors: dict[int, tuple[list[torch.Tensor], int]] = {}

    def issue(self, operation: str, channel: Channel, start: Callable[[], Any]) -> Any:
        """Start an operation on a channel, in its place, and return what `start` returned."""
        self._refuse_in_region(operation)
        if self._refused is not None:
            raise self._refused
        if channel.broken:
            raise BrokenGroupError(channel.name, channel.broken)
        self._take_missed_turns()
        self._step((operation, channel.name))
        self.conduct.meet(channel)
        self.conduct.before_issue(self)
        try:
            return self._guarded(start)
        finally:
            self._num_issued += 1
            self.conduct.after_issue(self)

    def pass_through(self, start: Callable[[], Any]) -> Any:
        """Start an operation that is no crossing, because nobody else takes part."""
        self._refuse_in_region("an operation of a group of one")
        return self._guarded(start)

    def keep_work(self, work: Any, *, quiet: bool = False) -> None:
        """Remember what a Work belongs to, until it is waited for."""
        if work is not None:
            self._works[id(work)] = (work, _QUIET if quiet else self._num_issued - 1)

    def keep_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Remember what the results of a functional collective belong to, until the first is waited for."""
        entry = (tensors, self._num_issued - 1)
        for tensor in tensors:
            self._tensors[tensor.untyped_storage()._cdata] = entry

    def wait_work(self, work: Any, wait: Callable[[], Any]) -> Any:
        """Let the other strand go on, then wait for a Work."""
        _, ordinal = self._works.pop(id(work), (None, _ELSEWHERE))
        if ordinal == _QUIET:
            return self._guarded(wait)
        return self._cross((WAIT, ordinal), wait)

    def wait_tensor(self, tensor: torch.Tensor, wait: Callable[[], Any]) -> Any:
        """Let the other strand go on, then wait for the result of a functional collective."""
        entry = self._tensors.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return self._guarded(wait)
        tensors, ordinal = entry
        for one in tensors:
            # the whole operation has ended by then: its other results need no crossing of their own
            self._tensors.pop(one.untyped_storage()._cdata, None)
        return self._cross((WAIT, ordinal), wait)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a device's tensor to the host, and let the other strand go on meanwhile."""
        target, is_there = reads.begin_read(tensor)
        wait = functools.partial(reads.finish_read, is_there, self.conduct.patience_s, self.name)
        self._cross((WAIT, _ELSEWHERE), wait)
        return target

    @contextlib.contextmanager
    def region(self, *, holds_turn: bool) -> Iterator[None]:
        """Run a `communication()` region, and let the other strand go on meanwhile.

        Args:
            holds_turn: Whether the body only queues work (a device lane carries it out, and the turn is given away
                when the body ends), or is itself the communication (the turn is given away while it runs).
        """
        self._refuse_in_region("another communication() region")
        self._take_missed_turns()
        self._step((REGION, 0))
        self.conduct.paused(self)
        if not holds_turn:
            self.conduct.leave(self)
        self.in_region = True
        try:
            yield
            if holds_turn:
                self.conduct.leave(self)
        finally:
            self.in_region = False
            self.conduct.come_back(self)
            self.conduct.resumed(self, time.perf_counter_ns())

    def has_waits_left(self) -> bool:
        """Whether the record has another wait for this strand."""
        return self.expected is not None and any(step[0] == WAIT for step in self.expected[self.position :])

    def check_ended(self) -> None:
        """Raise if the record has more operations than this strand issued."""
        if self._refused is not None:
            raise self._refused
        for step in self.expected[self.position :] if self.expected is not None else ():
            if step[0] != WAIT:
                raise self._deviation(step, "its end", defined_at(self.call))

    def forget(self) -> None:
        """Hold nothing any more."""
        self.other = None  # type: ignore[assignment]
        self.call = self.later = None
        self.result = self.error = self.saved = self.final = self._refused = None
        self.release()

    def release(self) -> None:
        """Forget what was never waited for."""
        self._works.clear()
        self._tensors.clear()

    def _cross(self, step: Step, wait: Callable[[], Any]) -> Any:
        self._refuse_in_region("a wait")
        takes_turn = self._meets_wait(step)
        if self.later is not None:
            self.later.catch_up()
        self.conduct.paused(self)
        if takes_turn:
            self._take_turn()
        begun = time.perf_counter_ns()
        try:
            return self._guarded(wait)
        except BrokenGroupError:
            raise
        except RuntimeError as error:
            # the backend gave up on a peer: say who failed, where that is known
            raise self.conduct.explain(self, error) from error
        finally:
            self.conduct.resumed(self, begun)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        self.inside = True
        try:
            return call()
        finally:
            self.inside = False

    def _take_turn(self) -> None:
        self.conduct.leave(self)
        self.conduct.come_back(self)

    def _meets_wait(self, step: Step) -> bool:
        """Whether the record has this wait next: only then is it a turn.

        Programs ask `work.is_completed()` before they wait, so that a wait may be missing, or be there for once. What
        has to be the same in every pair is what is issued: turns are taken where the record has them, those that were
        missed before the next operation, and a wait that the record does not have is carried out without one.
        """
        if self.expected is None:
            self.met.append(step)
        elif self.position >= len(self.expected) or self.expected[self.position] != step:
            return False
        self.position += 1
        return True

    def _take_missed_turns(self) -> None:
        while self.expected is not None and self.position < len(self.expected):
            if self.expected[self.position][0] != WAIT:
                break
            self.position += 1
            self._take_turn()

    def _step(self, step: Step) -> None:
        if self.expected is None:
            self.met.append(step)
        elif self.position >= len(self.expected):
            raise self._deviation(None, _say(step))
        elif self.expected[self.position] != step:
            raise self._deviation(self.expected[self.position], _say(step))
        self.position += 1

    def _deviation(self, expected: Step | None, met: str, line: str = "") -> DeviationError:
        self._refused = DeviationError(
            rank=self.conduct.rank,
            strand=self.name,
            crossing=self.position,
            expected=_say(expected) if expected is not None else "the strand's end",
            met=met,
            line=line or user_line() or defined_at(self.call),
        )
        return self._refused

    def _refuse_in_region(self, what: str) -> None:
        if self.in_region:
            raise NotWeavableError(
                "A communication() region is for communication that is not torch.distributed's",
                given=f"{what} inside it, at {user_line()}",
                remedy="leave the region out: operations of torch.distributed are found by themselves",
            )


def _say(step: Step) -> str:
    if step[0] == WAIT:
        return f"a wait for its operation {step[1]}" if step[1] != _ELSEWHERE else "a wait for an earlier operation"
    if step[0] == REGION:
        return "the end of a communication() region"
    return f"{step[0]} on {step[1]}"


def defined_at(call: Any) -> str:
    """Return `file:line` where a callable is defined, or what it is."""
    code = getattr(inspect.unwrap(getattr(call, "func", call)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(call)


def user_line() -> str:
    """Return `file:line` of the innermost frame that is neither torch's nor ours, or "" where there is none."""
    folders = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    ours = (*folders, contextlib.__file__, threading.__file__)
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
