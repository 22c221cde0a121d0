"""IDEA: now and then ranks compare, over the store and without waiting, which kind of pair they run.

A kind's name is each rank's own. Where callables differ between ranks, or `kind=` does, two ranks could run one pair as
two kinds that both of them know, each in its proven order, and exchange wrong data. What a kind is on every rank is the
number of its agreement on a channel. It is posted for the first, second, fourth, eighth pair on a channel and so on,
and every 64th, and read when the next pair begins: such a program is stopped a pair later.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchweave.engine.agreement import Ledger
from torchweave.engine.channels import Channel
from torchweave.errors import BrokenGroupError

_EVERY = 64


class Audit:
    """What this rank has posted, and not yet compared.

    Args:
        rank: This process's global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: list[tuple[Channel, str, str]] = []

    def post(self, channels: Sequence[Channel], agreements: dict[str, int], choice: str) -> None:
        """Say which kind this rank runs now, where it is time to.

        Args:
            channels: The kind's channels.
            agreements: The number of the kind's agreement on each channel.
            choice: The strategy that runs it.
        """
        for channel in channels:
            number = channel.next_known_pair()
            if channel.has_peers and (number & (number - 1) == 0 or number % _EVERY == 0):
                topic, said = f"runs/{channel.name}/{number}", f"kind {agreements[channel.name]} by {choice}"
                Ledger(self._rank).post(topic, said.encode())
                self._pending.append((channel, topic, said))

    def compare(self) -> None:
        """Read what the others said for the same pairs; what is not there yet is not waited for.

        Raises:
            BrokenGroupError: Another rank ran another kind, or by another strategy.
        """
        pending, self._pending = self._pending, []
        for channel, topic, said in pending:
            ledger = Ledger(self._rank)
            for member in channel.members:
                theirs = ledger.read(topic, member) if member != self._rank else None
                if theirs is not None and theirs.decode() != said:
                    channel.broken = (
                        f"rank {self._rank} ran {said}, rank {member} the same pair as {theirs.decode()}: every rank "
                        "has to weave the same pairs in the same order, and to give them the same names"
                    )
                    raise BrokenGroupError(channel.name, channel.broken)
