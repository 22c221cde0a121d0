"""IDEA: who is recording now. A rank for which a kind of pair is new must not meet one that weaves it already."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from torchweave.engine.agreement import Ledger
from torchweave.errors import UsageError, WaitLimitError

_TOPIC = "recording"
_OVERRIDDEN = "overridden"


class Roll:
    """Says that this rank records a pair, and waits for those that it is about to communicate with to do the same.

    What is said belongs to the rank, not to a group: it is said before the pair begins, so that nobody waits for
    something that comes later in another rank's pair.

    Args:
        rank: This process's global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_recordings = 0
        self._has_declined = False
        # the number of the recording in which each rank was met last, and before this recording
        self._seen: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def never(self, why: str) -> None:
        """Say, once, that this rank records nothing, and why."""
        if not self._has_declined and dist.is_available() and dist.is_initialized():
            self._has_declined = True
            Ledger(self._rank).post(_TOPIC, f"{self._num_recordings} {_OVERRIDDEN} {why}".encode())

    def begin(self) -> None:
        """Say that this rank begins to record a pair."""
        self._num_recordings += 1
        self._before = dict(self._seen)
        self._say(active=True)

    def end(self) -> None:
        """Say that it has ended."""
        self._say(active=False)

    def wait_for(self, members: Sequence[int], limit_s: float) -> None:
        """Wait until every member records too, before anything is sent to it.

        Raises:
            WaitLimitError: One does not: it weaves this pair already, or runs it outside of a weave.
            UsageError: One says that it never will.
        """
        ledger = Ledger(self._rank)
        end, pause = time.monotonic() + limit_s, 0.0005
        for member in members:
            while member != self._rank and not self._records(ledger, member):
                if time.monotonic() > end:
                    raise WaitLimitError(
                        f"rank {self._rank}, for which this kind of pair is new,",
                        f"rank {member} to record it too",
                        limit_s,
                        remedy="call weave for the same pairs in the same order on every rank, and give pairs the "
                        "same names, weave(..., kind=...), where their callables differ between ranks",
                    )
                time.sleep(pause)
                pause = min(pause * 2, 0.05)

    def _records(self, ledger: Ledger, member: int) -> bool:
        said = ledger.read(_TOPIC, member)
        if said is None:
            return False
        number, active, *why = said.decode().split(" ", 2)
        if active == _OVERRIDDEN:
            raise UsageError(
                "A strategy that is set from outside has to be set for every rank",
                given=f"rank {member} has {why[0]}, rank {self._rank} has not",
                remedy="set it where all ranks are started, or nowhere",
            )
        if active != "active" or int(number) <= self._before.get(member, 0):
            return False
        self._seen[member] = int(number)
        return True

    def _say(self, *, active: bool) -> None:
        if dist.is_available() and dist.is_initialized():
            Ledger(self._rank).post(_TOPIC, f"{self._num_recordings} {'active' if active else 'over'}".encode())
