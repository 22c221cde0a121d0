"""IDEA: the strategy `streams`: both strands run freely, and operations are issued in one fixed order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from torchweave.engine.baton import batons
from torchweave.engine.channels import Channel
from torchweave.engine.conduct import Conduct, unprovable, where_threads_stand
from torchweave.engine.lanes import ForwardLane, Lanes
from torchweave.engine.observe import Log
from torchweave.engine.strands import Strand
from torchweave.errors import NotWeavableError, WaitLimitError


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
        # Each strand waits at a gate of its own, which the other one alone opens. Whoever waits says so before it looks
        # at what it waits for, and whoever changes that looks afterwards whether somebody waits: no lock is needed.
        self._gates = batons()
        self._waiting: set[str] = set()
        # all channels are known: a strand that meets another one is refused
        self._patience_s = self.patience_s
        # strands that wait for the verdict on the other's failure
        self._blocked: set[str] = set()

    def lane(self, strand: Strand) -> contextlib.AbstractContextManager[None]:
        """Give the forward another compute lane than the backward's."""
        if strand.name == "forward":
            return self._forward_lane.take(self.patience_s)
        return contextlib.nullcontext()

    def before_issue(self, strand: Strand) -> None:
        """Wait for this operation's place in the order.

        Where the other strand has failed, this one goes on as far as the order takes it, and there waits for the
        verdict: how far it came is then the same on every rank that failed alike.
        """
        if strand.name == "backward":
            self._forward_lane.backward_is_here()
        if self.failure is None and self._is_next(strand):
            return  # and it stays next, until it has issued
        if not self._wait_for(strand, lambda: self._is_next(strand) or _stopped(strand.other)):
            raise WaitLimitError(
                f"the {strand.name} strand of rank {self.rank}",
                f"operation {self._next} of the {strand.other.name} strand, standing at:\n{where_threads_stand()}",
                self._patience_s,
            )
        if not self._is_next(strand) or (self.failure is not None and self.failure.broke_groups):
            self._blocked.add(strand.name)
            self._wake(strand.other)
            super().before_issue(strand)

    def _wait_for(self, strand: Strand, condition: Callable[[], bool]) -> bool:
        """Wait for what the other strand does, and say whether it has come true."""
        end = time.monotonic() + self._patience_s
        self._waiting.add(strand.name)
        try:
            while not condition():
                if not self._gates[strand.name].take(max(0.0, end - time.monotonic())):
                    return condition()
            return True
        finally:
            self._waiting.discard(strand.name)

    def _wake(self, strand: Strand) -> None:
        """Let a strand look again, where it waits."""
        gate = self._gates[strand.name]
        if strand.name in self._waiting and gate.is_away:
            gate.hand()

    def _is_next(self, strand: Strand) -> bool:
        return self._next < len(self._order) and self._order[self._next] == strand.name

    def forbid(self, strand: Strand, why: str) -> None:
        """Refuse what the record did not have and no proof covers."""
        raise unprovable(strand, why)

    def forbid_streams(self, why: str) -> None:
        """Refuse what the record did not have and free strands cannot do."""
        raise NotWeavableError("Free strands cannot run this pair", given=why, remedy="use strategy='turns'")

    def after_issue(self, strand: Strand) -> None:
        """Let the next operation be issued."""
        self._next += 1
        self._wake(strand.other)

    def end(self, strand: Strand) -> None:
        """Wake the other strand: it need not wait for this one any more."""
        super().end(strand)
        if strand.name == "backward":
            self._forward_lane.backward_is_here()
        self._wake(strand.other)

    def fail(self, strand: Strand, error: BaseException) -> None:
        """As always, and wake the other strand."""
        if strand.name == "backward":
            self._forward_lane.backward_is_here()
        self._wake(strand.other)
        super().fail(strand, error)

    def where_it_failed(self, strand: Strand) -> str:
        """Say how far both strands came, once the other one has ended, failed too, or waits for this one."""
        other = strand.other
        self._wait_for(strand, lambda: _stopped(other) or other.name in self._blocked)
        return " and ".join(
            f"{one.name} strand at step {one.position}{'' if one.error is None else ' (failed)'}"
            for one in sorted((strand, other), key=lambda one: one.name)
        )


def _stopped(strand: Strand) -> bool:
    return strand.done or strand.error is not None
