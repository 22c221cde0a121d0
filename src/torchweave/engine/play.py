"""IDEA: run two strands to their ends, whatever happens in them, and come out with one result or the first error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchweave.engine.collectives import Interception
from torchweave.engine.conduct import Conduct, where_threads_stand
from torchweave.engine.hazards import Hazards
from torchweave.engine.order import Record
from torchweave.engine.state import Inherited
from torchweave.engine.strands import Strand
from torchweave.engine.turns import Turns, backward_changes
from torchweave.engine.worker import Worker
from torchweave.errors import DeviationError, WaitLimitError

T = TypeVar("T")


class Strands:
    """The two strands of one pair.

    Args:
        conduct: Decides who may go on.
        backward: The backward's record, or None to write one.
        forward: The forward's record, or None to write one.
    """

    def __init__(self, conduct: Conduct, backward: Record | None = None, forward: Record | None = None) -> None:
        self.conduct = conduct
        self.backward = Strand("backward", conduct, backward)
        self.forward = Strand("forward", conduct, forward)
        self.backward.other, self.forward.other = self.forward, self.backward

    @property
    def deviated(self) -> bool:
        """Whether a strand left its record, which is then worth nothing."""
        return any(isinstance(strand.error, DeviationError) for strand in (self.backward, self.forward))

    def outcome(self) -> Any:
        """Return the forward's result, or raise the error that came first, with the other's chained to it."""
        errors = [strand.error for strand in self._by_failure() if strand.error is not None]
        if not errors:
            return self.forward.result
        first = errors[0]
        if len(errors) > 1:
            _chain(first, errors[1])
        try:
            raise first
        finally:
            # the error's traceback holds this frame: what the frame holds of the error would keep both alive
            del errors, first

    def part(self) -> None:
        """Let the strands forget each other, their results and their errors.

        They know each other and their conduct, so what they hold would live until Python collects cycles: a forward's
        output, or the frames of an error with all their tensors.
        """
        if not (self.backward.done and self.forward.done):
            return  # given up: the other thread still runs, and needs what it has
        self.conduct.failure = None
        for strand in (self.backward, self.forward):
            strand.forget()

    def _by_failure(self) -> list[Strand]:
        """Return the strand whose error is to be raised first: Ctrl-C before all, else the one that failed first."""
        failed = self.conduct.failure.strand if self.conduct.failure is not None else self.backward
        return sorted(
            (self.backward, self.forward),
            key=lambda strand: (not isinstance(strand.error, KeyboardInterrupt), strand is not failed),
        )


def _chain(first: BaseException, second: BaseException) -> None:
    """Show the second error, too, in the traceback of the first."""
    last = first
    while last is not second and (earlier := last.__cause__ or last.__context__) is not None:
        last = earlier
    if last is not second:
        last.__context__ = second


def play_serially(strands: Strands, backward: Callable[[], Any], forward: Callable[[], T]) -> T:
    """Run backward, then forward, on this thread, untouched.

    The forward runs also where the backward failed, as in every strategy: other ranks may be waiting for it.
    """
    _run(strands.backward, backward, None)
    if isinstance(strands.backward.error, KeyboardInterrupt):
        raise strands.backward.error
    _run(strands.forward, forward, None)
    result: T = strands.outcome()
    return result


def play_watched(
    strands: Strands,
    backward: Callable[[], Any],
    forward: Callable[[], T],
    interception: Interception,
    hazards: Hazards | None = None,
) -> T:
    """Run backward, then forward, on this thread, and meet what each does.

    Args:
        strands: The two strands.
        backward: The backward callable.
        forward: The forward callable.
        interception: What finds the crossings.
        hazards: Looks at what the strands change; None where that is known.
    """
    nothing = contextlib.nullcontext
    watch_backward, watch_forward = (hazards.watch_backward, hazards.watch_forward) if hazards else (nothing, nothing)
    # collectives inside the backward have to be met on this thread, not on one of autograd's own
    with torch.autograd.set_multithreading_enabled(False):
        with watch_backward():
            _run(strands.backward, backward, interception)
        if isinstance(strands.backward.error, KeyboardInterrupt):
            raise strands.backward.error
        with watch_forward():
            _run(strands.forward, forward, interception)
    result: T = strands.outcome()
    return result


def play_together(
    strands: Strands,
    backward: Callable[[], Any],
    forward: Callable[[], T],
    interception: Interception,
    worker: Worker,
) -> T:
    """Run the backward on the worker's thread and the forward on this one, as the conduct decides.

    Raises:
        BaseException: Whatever a strand raised first; the other strand has run to its end by then.
        KeyboardInterrupt: At once, at the second Ctrl-C, while the other strand still runs.
    """
    conduct, strand = strands.conduct, strands.backward
    inherited = Inherited()

    def work() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            _run(strand, backward, interception)

    def job() -> None:
        try:
            inherited.run(work)
        except BaseException as error:
            # the state could not be taken over; a strand that has run has recorded its own error
            strand.error = strand.error or error
            conduct.fail(strand, error)
        finally:
            if not strand.done:
                conduct.end(strand)

    try:
        # inside: a Ctrl-C that comes when it has begun must not leave it behind
        worker.start(job)
        with torch.autograd.set_multithreading_enabled(False):
            _run(strands.forward, forward, interception)
    except BaseException as error:
        # Ctrl-C between two steps of ours, or no more threads: neither strand must wait for the other, whatever is done
        if worker.is_idle and not strand.done:
            conduct.end(strand)
        strands.forward.error = strands.forward.error or error
        conduct.fail(strands.forward, error)
        conduct.end(strands.forward)
        raise
    finally:
        try:
            _await(worker, strands)
        finally:
            if conduct.failure is not None or not worker.is_idle or not torch.cuda.is_initialized():
                worker.retire()
        inherited.clear_casts()
    if conduct.failure is None:
        if inherited.left_behind:
            raise backward_changes(inherited.left_behind)
        if isinstance(conduct, Turns):
            conduct.settle_state(strands.backward, strands.forward)
    result: T = strands.outcome()
    return result


def _run(strand: Strand, call: Callable[[], Any], interception: Interception | None) -> None:
    """Run one strand to its end and keep its result or error."""
    conduct = strand.conduct
    strand.call = call
    try:
        if interception is not None:
            interception.bind(strand)
        conduct.begin(strand)
        with conduct.lane(strand):
            strand.result = call()
        strand.check_ended()
    except BaseException as error:
        strand.error = error
        conduct.fail(strand, error)
    finally:
        conduct.end(strand)
        if interception is not None:
            interception.unbind()


def _await(worker: Worker, strands: Strands) -> None:
    """Wait for the backward's end; a first Ctrl-C is kept for later, a second one gives up."""
    limit_s = 2 * strands.conduct.patience_s
    while True:
        try:
            ended = worker.wait(limit_s)
            break
        except KeyboardInterrupt as interrupt:
            if isinstance(strands.forward.error, KeyboardInterrupt):
                raise
            strands.forward.error = interrupt
    if not ended:
        raise WaitLimitError(
            "weave",
            f"the end of the backward strand, standing at:\n{where_threads_stand()}",
            limit_s,
        )
