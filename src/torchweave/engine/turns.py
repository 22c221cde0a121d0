"""IDEA: the strategy `turns`: one strand runs at a time, and at each wait it lets the other go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweave.engine.baton import batons
from torchweave.engine.channels import Channel
from torchweave.engine.conduct import Conduct, unprovable, where_threads_stand
from torchweave.engine.observe import Log
from torchweave.engine.order import ALTERNATING, Kept
from torchweave.engine.state import Shared
from torchweave.engine.strands import Saved, Strand
from torchweave.errors import NotWeavableError, WaitLimitError


class Turns(Conduct):
    """One strand runs at a time; at its waits it lets the other go on. The backward begins.

    The order depends on nothing but the strands' own steps, so it is the same on every rank whose record is the same.

    Args:
        rank: Global rank of this process.
        channels: The channels of the record.
        log: Where begin and end times go, or None.
        stateful: Objects whose `_training_state` belongs to a strand.
        kept: The waits at which a strand keeps its turn, proved to be the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        channels: Sequence[Channel],
        log: Log | None,
        stateful: Sequence[Any] = (),
        kept: Kept = ALTERNATING,
    ) -> None:
        super().__init__(rank, channels, log)
        self._stateful = tuple(stateful)
        self._kept = kept._asdict()
        # all channels are known: a strand that meets another one is refused
        self._patience_s = self.patience_s
        self._batons = batons()
        self._holder = "backward"
        self.initial: Saved = (Shared.capture(), self._passes())

    def begin(self, strand: Strand) -> None:
        """The backward has the first turn; the forward waits for it, and begins with the state of the pair's begin."""
        if strand.name == "forward":
            strand.saved = self.initial
            self._take(strand)
        super().begin(strand)

    def leave(self, strand: Strand) -> None:
        """Hand the turn over, unless this is a wait at which it is kept."""
        other = strand.other
        # the step at which the strand stands is the one before its position
        if other.done or strand.position - 1 in self._kept[strand.name]:
            return
        strand.saved = self._capture()
        with self._mutex:
            if other.done:  # it ended without a turn: interrupted while it waited for one
                strand.saved = None
                return
            self._holder = other.name
            self._batons[other.name].hand()

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
                self._batons[strand.other.name].hand()

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
        return Shared.capture(self.initial[0]), self._passes()

    def _passes(self) -> tuple[Any, ...]:
        return tuple([owner._training_state for owner in self._stateful]) if self._stateful else ()

    def _take(self, strand: Strand) -> None:
        if not self._batons[strand.name].take(self._patience_s):
            raise WaitLimitError(
                f"the {strand.name} strand of rank {self.rank}",
                f"its turn, which the {strand.other.name} strand holds, standing at:\n{where_threads_stand()}",
                self._patience_s,
            )
        saved, strand.saved = strand.saved, None
        if saved is not None:
            shared, passes = saved
            # what the other strand left is what is there now
            left = strand.other.saved or strand.other.final
            shared.restore(left[0] if left is not None else None)
            for owner, value in zip(self._stateful, passes, strict=True):
                owner._training_state = value


def backward_changes(changes: Sequence[str]) -> NotWeavableError:
    """Return the error for a backward that leaves state behind which a serial run's forward would see."""
    return NotWeavableError(
        "A woven backward must leave random and numerical state as it found it, because the forward has begun already",
        given=f"the backward changed: {', '.join(changes)}",
        remedy="restore that state at the end of the backward (activation checkpointing does, with "
        "preserve_rng_state=True), or use strategy='serial'",
    )
