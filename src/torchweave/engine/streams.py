"""IDEA: the strategy `streams`: both strands run freely, and operations are issued in one fixed order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

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
        self._turn = threading.Condition()
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
        with self._turn:
            if not self._turn.wait_for(lambda: self._is_next(strand) or _stopped(strand.other), self.patience_s):
                raise WaitLimitError(
                    f"the {strand.name} strand of rank {self.rank}",
                    f"operation {self._next} of the {strand.other.name} strand, standing at:\n{where_threads_stand()}",
                    self.patience_s,
                )
            goes_on = self._is_next(strand) and not (self.failure is not None and self.failure.broke_groups)
            if not goes_on:
                self._blocked.add(strand.name)
                self._turn.notify_all()
        if not goes_on:
            super().before_issue(strand)

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
        if strand.name == "backward":
            self._forward_lane.backward_is_here()
        with self._turn:
            self._turn.notify_all()
        super().fail(strand, error)

    def where_it_failed(self, strand: Strand) -> str:
        """Say how far both strands came, once the other one has ended, failed too, or waits for this one."""
        other = strand.other
        with self._turn:
            self._turn.wait_for(lambda: _stopped(other) or other.name in self._blocked, self.patience_s)
        return " and ".join(
            f"{one.name} strand at step {one.position}{'' if one.error is None else ' (failed)'}"
            for one in sorted((strand, other), key=lambda one: one.name)
        )


def _stopped(strand: Strand) -> bool:
    return strand.done or strand.error is not None
