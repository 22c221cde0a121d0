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
