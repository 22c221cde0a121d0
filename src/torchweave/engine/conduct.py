"""IDEA: who may go on, and when: the strategies `serial`, `turns` and `streams` as three conducts of two strands."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from torchweave.engine import agreement
from torchweave.engine.channels import Channel
from torchweave.engine.lanes import ForwardLane, Lanes
from torchweave.engine.observe import Log
from torchweave.engine.state import Shared
from torchweave.engine.strands import Saved, Strand
from torchweave.errors import BrokenGroupError, NotWeavableError, WaitLimitError

# A group's timeout bounds every wait; where no group is in sight, this does (c10d's own default).
DEFAULT_LIMIT_S = 1800.0
# After Ctrl-C the other ranks are given this long to show that they were interrupted at the same place.
INTERRUPT_LIMIT_S = 5.0
MARGIN_S = 5.0


class Failure:
    """The first failure of a pair: what it was, and whether every rank failed alike."""

    def __init__(self, strand: Strand) -> None:
        self.strand = strand
        self.verdict = ""
        self._settled = threading.Event()

    def settle(self, verdict: str) -> None:
        """Say why the groups are broken, or "" where they still work."""
        self.verdict = verdict
        self._settled.set()

    def wait(self, limit_s: float) -> str:
        """Return the verdict, once the ranks have agreed on it."""
        if not self._settled.wait(limit_s):
            return f"the {self.strand.name} strand failed, and the ranks did not agree on it within {limit_s:g} s"
        return self.verdict


class Conduct:
    """What all strategies share: limits, failures, and the channels that the pair uses. By itself it is `serial`.

    Args:
        rank: Global rank of this process.
        channels: The channels of the record; empty where there is none yet.
        log: Where begin and end times go, or None.
    """

    def __init__(self, rank: int, channels: Sequence[Channel], log: Log | None) -> None:
        self.rank, self.log = rank, log
        self.channels: dict[str, Channel] = {channel.name: channel for channel in channels}
        self.failure: Failure | None = None
        # why the pair may not be woven at all, and why not by free strands: found while its record is written
        self.veto = ""
        self.streams_veto = ""
        self._mutex = threading.Lock()

    @property
    def limit_s(self) -> float:
        """How long anything in this pair may be waited for, seconds."""
        return min((channel.limit_s for channel in self.channels.values()), default=DEFAULT_LIMIT_S)

    @property
    def patience_s(self) -> float:
        """How long one strand waits for the other, seconds: longer than a backend waits for a peer.

        A strand may wait in the backend while the other waits for it, and its error names the rank that failed.
        """
        return 2 * self.limit_s + MARGIN_S

    def meet(self, channel: Channel) -> None:
        """Note that the pair uses a channel."""
        self.channels.setdefault(channel.name, channel)

    def forbid(self, strand: Strand, why: str) -> None:
        """Note that this pair must stay serial; where it is woven already, refuse before anything is sent."""
        self.veto = self.veto or f"the {strand.name} strand cannot be woven: {why}"

    def forbid_streams(self, why: str) -> None:
        """Note that this pair must not run with free strands."""
        self.streams_veto = self.streams_veto or why

    def begin(self, strand: Strand) -> None:
        """Wait until a strand may begin."""
        if self.log is not None:
            self.log.begin(strand.name)

    def lane(self, strand: Strand) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a strand runs on its compute lane: the one that is current."""
        return contextlib.nullcontext()

    def before_issue(self, strand: Strand) -> None:
        """Wait until a strand may issue its next operation; raise where the ranks are out of step."""
        failure = self.failure
        if failure is not None and failure.strand is not strand and (verdict := failure.wait(self.patience_s)):
            raise BrokenGroupError(", ".join(sorted(self.channels)), verdict)

    def after_issue(self, strand: Strand) -> None:
        """Note that a strand has issued its operation."""

    def leave(self, strand: Strand) -> None:
        """Let the other strand go on, where the strategy does that."""

    def come_back(self, strand: Strand) -> None:
        """Wait until this strand may go on."""

    def end(self, strand: Strand) -> None:
        """Note that a strand has ended."""
        strand.done = True
        strand.release()
        if self.log is not None:
            self.log.end(strand.name)

    def fail(self, strand: Strand, error: BaseException) -> None:
        """Find out whether every rank failed alike; if not, the groups are broken from here on."""
        with self._mutex:
            if self.failure is not None:
                return
            failure = self.failure = Failure(strand)
        channels = list(self.channels.values())
        verdict = "the failure could not be shared"
        try:
            verdict = self._share(strand, error, channels)
        finally:
            for channel in channels:
                if verdict and channel.has_peers:
                    channel.broken = verdict
            failure.settle(verdict)

    def _share(self, strand: Strand, error: BaseException, channels: list[Channel]) -> str:
        what = f"{type(error).__name__}: {error}"
        where = f"{strand.name} strand at step {strand.position}"
        limit_s = min(self.limit_s, INTERRUPT_LIMIT_S) if isinstance(error, KeyboardInterrupt) else self.limit_s
        try:
            if isinstance(error, BrokenGroupError):
                # another rank failed first: this one is not alike, and there is nothing to wait for
                agreement.tell_failure(channels, self.rank, f"{where}, after another rank", what)
                return error.cause
            agreement.tell_failure(channels, self.rank, where, what)
            return agreement.failed_alike(channels, self.rank, where, limit_s)
        except RuntimeError as trouble:  # the store's host is gone
            return f"rank {self.rank} failed in its {where} ({what}), and the store did not answer: {trouble}"

    def explain(self, strand: Strand, error: RuntimeError) -> BrokenGroupError:
        """Turn a backend's error at a wait into ours, with what other ranks said of their failure."""
        cause = ""
        try:
            cause = agreement.failures_of_others(list(self.channels.values()), self.rank)
        except RuntimeError as trouble:
            cause = f"the store did not answer: {trouble}"
        step = f"rank {self.rank}, {strand.name} strand, step {strand.position - 1}: {error}"
        return BrokenGroupError(", ".join(sorted(self.channels)), f"{cause} ({step})" if cause else step)


class Turns(Conduct):
    """One strand runs at a time; at each wait it lets the other go on. The backward begins.

    The order depends on nothing but the strands' own steps, so it is the same on every rank whose record is the same.

    Args:
        rank: Global rank of this process.
        channels: The channels of the record.
        log: Where begin and end times go, or None.
        stateful: Objects whose `_training_state` belongs to a strand.
    """

    def __init__(self, rank: int, channels: Sequence[Channel], log: Log | None, stateful: Sequence[Any] = ()) -> None:
        super().__init__(rank, channels, log)
        self._stateful = tuple(stateful)
        self._locks = {"forward": threading.Lock(), "backward": threading.Lock()}
        self._locks["forward"].acquire()
        self._locks["backward"].acquire()
        self._holder = "backward"
        self.initial = self._capture()

    def begin(self, strand: Strand) -> None:
        """The backward has the first turn; the forward waits for it, and begins with the state of the pair's begin."""
        if strand.name == "forward":
            strand.saved = self.initial
            self._take(strand)
        super().begin(strand)

    def leave(self, strand: Strand) -> None:
        """Hand the turn over."""
        other = strand.other
        if other.done:
            return
        strand.saved = self._capture()
        with self._mutex:
            if other.done:  # it ended without a turn: interrupted while it waited for one
                strand.saved = None
                return
            self._holder = other.name
            self._locks[other.name].release()

    def come_back(self, strand: Strand) -> None:
        """Go on when the turn comes back; at once where it was not handed over."""
        if strand.saved is not None:
            self._take(strand)

    def end(self, strand: Strand) -> None:
        """Leave the turn to the other strand for good."""
        if self._holder == strand.name:
            strand.final = self._capture()
        super().end(strand)
        with self._mutex:
            if self._holder == strand.name and not strand.other.done:
                self._holder = strand.other.name
                self._locks[strand.other.name].release()

    def settle_state(self, backward: Strand, forward: Strand) -> None:
        """Leave the process in the state that a serial run leaves, or say that this cannot be.

        Raises:
            NotWeavableError: The backward left random or numerical state changed, which a serial run's forward sees.
        """
        if backward.final is not None and (changes := self.initial[0].changes(backward.final[0])):
            raise backward_changes(changes)
        if forward.final is not None:
            forward.final[0].restore()

    def forbid(self, strand: Strand, why: str) -> None:
        """Refuse what the record did not have and no proof covers."""
        raise unprovable(strand, why)

    def _capture(self) -> Saved:
        return Shared.capture(), tuple(owner._training_state for owner in self._stateful)

    def _take(self, strand: Strand) -> None:
        if not self._locks[strand.name].acquire(timeout=self.patience_s):
            raise WaitLimitError(
                f"the {strand.name} strand of rank {self.rank}",
                f"its turn, which the {strand.other.name} strand holds, standing at:\n{where_threads_stand()}",
                self.patience_s,
            )
        saved, strand.saved = strand.saved, None
        if saved is not None:
            shared, passes = saved
            shared.restore()
            for owner, value in zip(self._stateful, passes, strict=True):
                owner._training_state = value


class Streams(Conduct):
    """Both strands run freely, each on a compute lane of its own; operations are issued in one fixed order.

    Args:
        rank: Global rank of this process.
        channels: The channels of the record.
        log: Where begin and end times go, or None.
        order: Name of the strand that issues each operation, in the order that all ranks agreed on.
        lanes: The process's lanes.
    """

    def __init__(
        self, rank: int, channels: Sequence[Channel], log: Log | None, order: Sequence[str], lanes: Lanes
    ) -> None:
        super().__init__(rank, channels, log)
        self._order, self._next = order, 0
        self._forward_lane = ForwardLane(lanes)
        self._turn = threading.Condition()

    def lane(self, strand: Strand) -> contextlib.AbstractContextManager[None]:
        """Give the forward another compute lane than the backward's."""
        if strand.name == "forward":
            return self._forward_lane.take(self.patience_s)
        return contextlib.nullcontext()

    def before_issue(self, strand: Strand) -> None:
        """Wait for this operation's place in the order."""
        if strand.name == "backward":
            self._forward_lane.backward_is_here()
        with self._turn:
            free = self._turn.wait_for(
                lambda: self.failure is not None or strand.other.done or self._order[self._next] == strand.name,
                timeout=self.patience_s,
            )
        if not free:
            raise WaitLimitError(
                f"the {strand.name} strand of rank {self.rank}",
                f"operation {self._next} of the {strand.other.name} strand, standing at:\n{where_threads_stand()}",
                self.patience_s,
            )
        super().before_issue(strand)

    def forbid(self, strand: Strand, why: str) -> None:
        """Refuse what the record did not have and no proof covers."""
        raise unprovable(strand, why)

    def forbid_streams(self, why: str) -> None:
        """Refuse what the record did not have and free strands cannot do."""
        raise NotWeavableError("Free strands cannot run this pair", given=why, remedy="use strategy='turns'")

    def after_issue(self, strand: Strand) -> None:
        """Let the next operation be issued."""
        with self._turn:
            self._next += 1
            self._turn.notify_all()

    def end(self, strand: Strand) -> None:
        """Wake the other strand: it need not wait for this one any more."""
        super().end(strand)
        if strand.name == "backward":
            self._forward_lane.backward_is_here()
        with self._turn:
            self._turn.notify_all()

    def fail(self, strand: Strand, error: BaseException) -> None:
        """As always, and wake the other strand."""
        try:
            super().fail(strand, error)
        finally:
            with self._turn:
                self._turn.notify_all()


def unprovable(strand: Strand, why: str) -> NotWeavableError:
    """Return the error for an operation whose order cannot be proved, in a pair that is being woven."""
    return NotWeavableError(
        "The order of a pair's operations is proved before it is woven",
        given=f"the {strand.name} strand cannot be woven: {why}",
        remedy="use strategy='serial' for this pair",
    )


def backward_changes(changes: Sequence[str]) -> NotWeavableError:
    """Return the error for a backward that leaves state behind which a serial run's forward would see."""
    return NotWeavableError(
        "A woven backward must leave random and numerical state as it found it, because the forward has begun already",
        given=f"the backward changed: {', '.join(changes)}",
        remedy="restore that state at the end of the backward (activation checkpointing does, with "
        "preserve_rng_state=True), or use strategy='serial'",
    )


def where_threads_stand() -> str:
    """Return the innermost lines of every thread of the process, for an error about a wait that is too long."""
    lines = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines.append(f"thread {names.get(ident, ident)}:")
            lines.extend(f"  {entry.rstrip()}" for entry in traceback.format_stack(frame)[-4:])
    return "\n".join(lines)
