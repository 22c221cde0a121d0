"""IDEA: `weave(forward, backward)`, the function that the library exists for."""

from __future__ import annotations

import functools
import logging
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchweave.engine import choose
from torchweave.engine.audit import Audit
from torchweave.engine.channels import Channels
from torchweave.engine.collectives import Interception
from torchweave.engine.conduct import Conduct, Recording
from torchweave.engine.hazards import Hazards
from torchweave.engine.kinds import Fingerprint, Kinds
from torchweave.engine.lanes import Lanes
from torchweave.engine.later import Later
from torchweave.engine.observe import Log
from torchweave.engine.order import ALTERNATING
from torchweave.engine.play import Strands, play_serially, play_together, play_watched
from torchweave.engine.roll import Roll
from torchweave.engine.segments import Measuring
from torchweave.engine.strands import Strand
from torchweave.engine.streams import Streams
from torchweave.engine.trial import MEASURED, REORDERED, SERIAL
from torchweave.engine.turns import Turns
from torchweave.engine.worker import Worker
from torchweave.errors import BrokenGroupError, NotWeavableError, UsageError, described

T = TypeVar("T")

_LOG = logging.getLogger("torchweave")
# overrides the strategy of every weave: a switch for emergencies
OVERRIDE = "TORCHWEAVE_STRATEGY"
_OLDEST_TORCH = (2, 10)
# so many kinds of pairs are a sign that they are told apart by something that should not count
MANY_KINDS, MOST_KINDS = 128, 1024


class Engine:
    """What one process remembers between pairs: channels, kinds of pairs, lanes, and that c10d is watched."""

    def __init__(self) -> None:
        self.channels = Channels()
        self.interception = Interception(self.channels)
        self.lanes = Lanes()
        self._kinds = Kinds()
        self._decisions: dict[Hashable, choose.Decision] = {}
        # whoever weaves now, first come first
        self._running: dict[object, None] = {}
        self._log: Log | None = None
        self._worker = Worker()
        self._world: tuple[Callable[[], dist.ProcessGroup | None], tuple[Roll, Audit]] | None = None

    @contextmanager
    def observe(self) -> Iterator[Log]:
        """Record when the strands of every pair inside computed and waited."""
        self._log = log = Log()
        try:
            yield log
        finally:
            self._log = None

    def decision(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> choose.Decision | None:
        """Return what was decided for pairs of this kind, or None where none has run yet."""
        return self._decisions.get(self._kinds.name(self._kinds.fingerprint(forward, backward)))

    def choices(self) -> tuple[choose.Choice, ...]:
        """Return how pairs of each kind run, in the order in which the kinds were met."""
        return tuple(choose.Choice.of(decision) for decision in self._decisions.values())

    def override(self, setting: str) -> None:
        """Tell the other ranks that a setting from outside keeps this one from weaving at all."""
        self._current_roll().never(setting)

    def close(self) -> None:
        """Leave c10d as it was, end the backward's thread, and forget everything."""
        self.interception.remove()
        self._worker.retire()
        self._decisions.clear()

    def weave(self, forward: Callable[[], T], backward: Callable[[], Any], strategy: str, kind: Hashable) -> T:
        """Run a pair; see `weave`."""
        if self.interception.current() is not None:
            # a weave inside a strand is a part of that strand: one after the other, its crossings are the strand's
            backward()
            return forward()
        ticket = object()
        try:
            # a dictionary instead of a lock: a Ctrl-C may come between any two calls, and must not leave it taken
            self._running[ticket] = None
            if next(iter(self._running.copy())) is not ticket:
                raise UsageError(
                    "One pair at a time is woven in a process",
                    given="a second weave from another thread while the first still runs",
                    remedy="weave the pairs one after the other, or use one process for each device",
                )
            return self._weave(forward, backward, strategy, kind)
        finally:
            self._running.pop(ticket, None)
            # a strand does this itself, unless Ctrl-C comes at its very end
            self.interception.unbind()

    def _weave(self, forward: Callable[[], T], backward: Callable[[], Any], strategy: str, kind: Hashable) -> T:
        if strategy == SERIAL:
            return self._serially(forward, backward)
        if not self.interception.installed:
            self.interception.install()
        fingerprint = self._kinds.fingerprint(forward, backward) if kind is None else Fingerprint(kind, Counter())
        key = self._kinds.name(fingerprint)
        decision = self._decisions.get(key)
        if decision is None or not decision.is_current():
            return self._record(forward, backward, strategy, fingerprint)
        for channel in decision.channels:
            if channel.broken:
                raise BrokenGroupError(channel.name, channel.broken)
        if strategy == choose.AUTO:
            with decision.trial.pair() as chosen:
                return self._run(forward, backward, chosen, decision, key)
        return self._run(forward, backward, decision.strategy_for(strategy), decision, key)

    def _run(
        self,
        forward: Callable[[], T],
        backward: Callable[[], Any],
        chosen: str,
        decision: choose.Decision,
        key: Hashable,
    ) -> T:
        """Run a pair of a kind that is known by a strategy that may run it."""
        audit = self._current_audit()
        audit.compare()
        audit.post(decision.channels, decision.agreements, chosen)
        if chosen == SERIAL:
            return self._serially(forward, backward)
        strands = Strands(self._conduct(chosen, decision), decision.backward, decision.forward)
        strands.backward.later = Later() if decision.weights_wait else None
        refuse = functools.partial(_refuse_optimizer, strands.backward, self.interception)
        hook = None if decision.steps_optimizer else register_optimizer_step_pre_hook(refuse)
        try:
            if chosen == MEASURED:
                return play_watched(strands, backward, forward, self.interception)
            return play_together(strands, backward, forward, self.interception, self._worker)
        finally:
            if hook is not None:
                hook.remove()
            if strands.deviated:
                self._decisions.pop(key, None)
            _count_pair(strands.conduct)
            strands.part()

    def _serially(self, forward: Callable[[], T], backward: Callable[[], Any]) -> T:
        strands = Strands(Conduct(_rank(), (), self._log))
        try:
            return play_serially(strands, backward, forward)
        finally:
            strands.part()

    def _current_roll(self) -> Roll:
        """Return who is recording, among the ranks of today's default group."""
        return self._of_this_world()[0]

    def _current_audit(self) -> Audit:
        """Return what was posted of the kinds that run, among the ranks of today's default group."""
        return self._of_this_world()[1]

    def _of_this_world(self) -> tuple[Roll, Audit]:
        world = _world()
        if self._world is None or self._world[0]() is not world:
            # not held: a group that lives on after it was destroyed ends the process badly
            self._world = (weakref.ref(world) if world is not None else _nobody, (Roll(_rank()), Audit(_rank())))
        return self._world[1]

    def _conduct(self, strategy: str, decision: choose.Decision) -> Conduct:
        if strategy == MEASURED and decision.reorder is not None:
            return Measuring(_rank(), decision.channels, self._log, decision.reorder.moments)
        if strategy in ("turns", REORDERED):
            kept = ALTERNATING if decision.reorder is None or strategy == "turns" else decision.reorder.kept
            return Turns(_rank(), decision.channels, self._log, decision.stateful_objects(), kept)
        return Streams(_rank(), decision.channels, self._log, decision.order, self.lanes)

    def _record(
        self, forward: Callable[[], T], backward: Callable[[], Any], strategy: str, fingerprint: Fingerprint
    ) -> T:
        """Run the first pair of a kind serially, write its record, and agree on it with the other ranks."""
        hazards = Hazards(forward, backward)
        roll = self._current_roll()
        conduct = Recording(_rank(), self._log, roll, hazards.at_crossing)
        strands = Strands(conduct)
        roll.begin()
        self.interception.foreign = set()
        try:
            result = play_watched(strands, backward, forward, self.interception, hazards)
            conduct.look_for_unseen()
            conduct.forbid_groups(self.interception.foreign)
            decision = choose.decide(strands, hazards)
        finally:
            self.interception.foreign = None
            roll.end()
            _count_pair(conduct)
            strands.part()
        self._kinds.learn(conduct.nodes)
        self._remember(self._kinds.name(fingerprint), decision)
        _LOG.info("a new kind of pair: %s, %s", decision.trial.choice, decision.trial.reason)
        if strategy == choose.AUTO:
            return result
        try:
            decision.strategy_for(strategy)
        except NotWeavableError as error:
            raise NotWeavableError(
                error.rule,
                given=error.given,
                remedy=f"{error.remedy}. This pair has run serially, as every first one does: its gradients are there, "
                "do not run it again",
            ) from None
        return result

    def _remember(self, key: Hashable, decision: choose.Decision) -> None:
        """Keep a decision; the oldest goes where there are too many, in the same order on every rank."""
        self._decisions[key] = decision
        if len(self._decisions) == MANY_KINDS:
            warnings.warn(
                f"weave has met {MANY_KINDS} kinds of pairs, and the first pair of each runs serially. If modules are "
                "made anew for every pair, or a number chooses among them, name the kinds: weave(..., kind=...)",
                stacklevel=6,
            )
        if len(self._decisions) > MOST_KINDS:
            del self._decisions[next(iter(self._decisions))]


def weave(
    forward: Callable[[], T],
    backward: Callable[[], Any],
    *,
    strategy: str = "auto",
    kind: Hashable = None,
) -> T:
    """Run a forward and a backward at once, the communication of each behind the computation of the other.

    The two callables know nothing of it: whatever they call from `torch.distributed` is found. The result, every
    gradient and the random state afterwards are those of backward, then forward, one after the other. The first pair
    of a kind runs that way, and is recorded; the ranks then agree over the store that the woven order is the same on
    all of them.

    Args:
        forward: Runs the forward of one microbatch, on the calling thread. It may call several modules, compute a loss,
            and call `torch.autograd.grad`.
        backward: Runs the backward of another microbatch, on a worker thread. It may call `backward()` several times.
        strategy: `auto`; `turns` (the strands alternate at every wait, backward first); `streams` (both run freely,
            collectives in one fixed order); or `serial` (backward, then forward, untouched).
        kind: A name for pairs that communicate alike, equal on all ranks. None tells kinds apart by the callables'
            code, the modules that they reach, and the backward's graph.

    Returns:
        What `forward` returned.

    Raises:
        UsageError: An argument is not what is allowed, or two pairs are to be woven at once.
        NotWeavableError: The pair cannot run by the strategy that was asked for (`auto` runs it serially).
        DeviationError: A strand met another crossing than its record has; nothing was sent.
        BrokenGroupError: Another rank failed, so that a process group is out of step.
        WaitLimitError: Something was waited for longer than the process group's timeout.
        BaseException: Whatever `forward` or `backward` raised; the other one has run to its end by then.
    """
    for name, value in (("forward", forward), ("backward", backward)):
        if not callable(value):
            raise UsageError(
                f"weave takes two callables; {name} has to be one",
                given=described(value),
                remedy=f"pass a function that does the work, as in weave({name}=lambda: ...), not what it returned",
            )
    choose.check_strategy(strategy)
    try:
        hash(kind)
    except TypeError as error:
        raise UsageError("kind has to be hashable", given=repr(kind), remedy="pass a string or a tuple") from error
    return engine().weave(forward, backward, _overridden(strategy), kind)


def choices() -> tuple[choose.Choice, ...]:
    """Return how `auto` runs each kind of pair that this process has met, and why, in numbers.

    Returns:
        One record a kind; as text, one line each.
    """
    return engine().choices()


def _overridden(strategy: str) -> str:
    """Return the strategy that the environment asks for, or the given one.

    Raises:
        UsageError: It is not one of the strategies.
    """
    setting = os.environ.get(OVERRIDE, "")
    if not setting:
        return strategy
    if setting not in choose.STRATEGIES:
        raise UsageError(
            f"{OVERRIDE} is one of " + ", ".join(choose.STRATEGIES), given=repr(setting), remedy="mend it, or unset it"
        )
    if setting == SERIAL:
        engine().override(f"{OVERRIDE}={setting}")
    return setting


def _refuse_optimizer(backward: Strand, interception: Interception, optimizer: Any, *_: Any) -> None:
    """Refuse, before it writes anything, an optimizer that steps in a backward whose first run had none."""
    if interception.current() is backward:
        raise NotWeavableError(
            "A woven backward must not step an optimizer that its first run did not step",
            given=f"{type(optimizer).__name__}.step() inside the backward",
            remedy="step after weave, or give the pairs that step a name of their own: weave(..., kind=...)",
        )


def _nobody() -> None:
    return None


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _count_pair(conduct: Conduct) -> None:
    for channel in conduct.channels.values():
        channel.num_pairs += 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@functools.cache
def engine() -> Engine:
    """Return the process's engine: c10d is one for the whole process, so what watches it is one too."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        raise UsageError("weave needs torch 2.10 or newer", given=f"torch {torch.__version__}", remedy="update torch")
    return Engine()
