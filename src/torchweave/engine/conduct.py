"""IDEA: who may go on, and when. What all strategies share, and the conduct of a pair that is recorded."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from torchweave import frames
from torchweave.engine import agreement
from torchweave.engine.channels import Channel
from torchweave.engine.observe import Log
from torchweave.engine.roll import Roll
from torchweave.engine.strands import Strand
from torchweave.errors import BrokenGroupError, NotWeavableError, WaitLimitError

_LOG = logging.getLogger("torchweave")

# A group's timeout bounds every wait; where no group is in sight, this does (c10d's own default).
DEFAULT_LIMIT_S = 1800.0
# After Ctrl-C the other ranks are given this long to show that they were interrupted at the same place.
INTERRUPT_LIMIT_S = 5.0
MARGIN_S = 5.0
# A backend's error may come a little before the rank that caused it has said what happened to it.
EXPLAIN_LIMIT_S = 2.0


class Failure:
    """The first failure of a pair: in which strand, and whether every rank failed alike."""

    def __init__(self, strand: Strand) -> None:
        self.strand = strand
        self.verdict = ""
        self._settled = threading.Event()

    @property
    def broke_groups(self) -> bool:
        """Whether it is known already that the ranks are out of step."""
        return self._settled.is_set() and bool(self.verdict)

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
        # whether something was issued where a weight's gradient was added
        self.weights_communicate = False
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

    def paused(self, strand: Strand) -> None:
        """Note that a strand has come to a crossing."""
        if self.log is not None:
            self.log.leave(strand.name, time.perf_counter_ns())

    def resumed(self, strand: Strand, wait_begun_ns: int) -> None:
        """Note that a strand goes on after a crossing, at which its own wait began at a time."""
        if self.log is not None:
            self.log.enter(strand.name, wait_begun_ns, time.perf_counter_ns())

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
        what = _told(error)
        where = self.where_it_failed(strand)
        limit_s = min(self.limit_s, INTERRUPT_LIMIT_S) if isinstance(error, KeyboardInterrupt) else self.limit_s
        try:
            if isinstance(error, BrokenGroupError | WaitLimitError):
                # another rank failed first, or is not there: nothing is alike, and there is nothing to wait for
                agreement.tell_failure(channels, self.rank, f"{where}, after another rank", what)
                return error.cause if isinstance(error, BrokenGroupError) else f"on rank {self.rank}, {error}"
            agreement.tell_failure(channels, self.rank, where, what)
            if any(channel.has_peers for channel in channels):
                # the error itself is raised only when this is known
                _LOG.warning(
                    "rank %d failed in its %s (%s); it waits up to %g s to learn whether the other ranks failed alike",
                    self.rank,
                    where,
                    what,
                    limit_s,
                )
            return agreement.failed_alike(channels, self.rank, where, limit_s)
        except RuntimeError as trouble:  # the store's host is gone
            return f"rank {self.rank} failed in its {where} ({what}), and the store did not answer: {trouble}"

    def where_it_failed(self, strand: Strand) -> str:
        """Say where a pair failed: the same text on every rank that failed alike."""
        return f"{strand.name} strand at step {strand.position}"

    def explain(self, strand: Strand, error: RuntimeError) -> BrokenGroupError:
        """Turn a backend's error at a wait into ours, with what other ranks said of their failure."""
        cause = ""
        try:
            cause = agreement.failures_of_others(list(self.channels.values()), self.rank, EXPLAIN_LIMIT_S)
        except RuntimeError as trouble:
            cause = f"the store did not answer: {trouble}"
        step = f"rank {self.rank}, {strand.name} strand, step {strand.position - 1}: {error}"
        return BrokenGroupError(", ".join(sorted(self.channels)), f"{cause} ({step})" if cause else step)


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error that cannot say what it is must not hide itself behind another one
        return type(error).__name__


class Recording(Conduct):
    """The conduct of the first pair of a kind: backward, then forward, and everything is written down.

    Args:
        rank: Global rank of this process.
        log: Where begin and end times go, or None.
        roll: Who is recording.
        at_crossing: Told the strand's name at each of its crossings.
    """

    def __init__(self, rank: int, log: Log | None, roll: Roll, at_crossing: Callable[[str], None]) -> None:
        super().__init__(rank, (), log)
        self._roll, self._at_crossing = roll, at_crossing
        # types of the autograd nodes in which the backward communicates
        self.nodes: set[type] = set()
        # of each group: its sequence number when the pair first met it, and how many operations were seen since
        self._begun: dict[str, int] = {}
        self._seen: Counter[str] = Counter()

    def meet(self, channel: Channel) -> None:
        """Make sure, before anything is sent, that the members record this pair too: a woven order is another."""
        if channel.name not in self.channels and channel.has_peers:
            self._roll.wait_for(channel.members, channel.limit_s)
        if channel.group not in self._begun:
            self._begun[channel.group] = channel.sequence_number()
        self._seen[channel.group] += 1
        super().meet(channel)
        node = torch._C._current_autograd_node()
        if node is not None:
            self.nodes.add(type(node))
            self.weights_communicate = self.weights_communicate or hasattr(node, "variable")

    def forbid_groups(self, foreign: set[str]) -> None:
        """Keep a pair serial that shares a group with a thread which is no strand: their order would be free."""
        shared = sorted(foreign & {channel.group for channel in self.channels.values()})
        if shared:
            self.veto = self.veto or f"another thread issues operations on group {shared[0]!r} meanwhile"

    def look_for_unseen(self) -> None:
        """Keep free strands off groups on which somebody else issues operations too: their order would be free."""
        groups = {channel.group: channel for channel in self.channels.values()}
        for name, begun in self._begun.items():
            if groups[name].sequence_number() - begun > self._seen[name]:
                self.forbid_streams(
                    f"group {name!r} has operations that are not seen: from C++, as DDP's, or from another thread"
                )

    def leave(self, strand: Strand) -> None:
        """Look at what the strand has changed where the other one would go on."""
        self._at_crossing(strand.name)


def unprovable(strand: Strand, why: str) -> NotWeavableError:
    """Return the error for an operation whose order cannot be proved, in a pair that is being woven."""
    return NotWeavableError(
        "The order of a pair's operations is proved before it is woven",
        given=f"the {strand.name} strand cannot be woven: {why}",
        remedy="use strategy='serial' for this pair",
    )


def where_threads_stand() -> str:
    """Return the innermost lines of every thread of the process, for an error about a wait that is too long."""
    lines = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with frames.others() as others:
        for ident, frame in others.items():
            lines.append(f"thread {names.get(ident, ident)}:")
            lines.extend(f"  {entry.rstrip()}" for entry in traceback.format_stack(frame)[-4:])
    return "\n".join(lines)
