"""IDEA: ranks meet on their hosts, over the store: nothing is queued on a device, and nobody waits without a limit."""

from __future__ import annotations

import torch.distributed as dist

from torchweave.engine.agreement import Ledger
from torchweave.engine.channels import group_timeout_s

_TOPIC = "meeting"


class Meeting:
    """The ranks of a group meet, in the same order of meetings on all of them.

    Args:
        group: The ranks.
        limit_s: How long one waits for the others, seconds; None takes the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, limit_s: float | None = None) -> None:
        self._rank, self._ranks = dist.get_rank(), tuple(dist.get_process_group_ranks(group))
        self._name = f"{_TOPIC}/{group.group_name}"
        self._limit_s = group_timeout_s(group) if limit_s is None else limit_s

    def tell(self, said: str = "") -> list[str]:
        """Say something to the other ranks and return what all of them say, by their number within the group.

        Raises:
            WaitLimitError: A rank did not come within the limit.
        """
        if len(self._ranks) == 1:
            return [said]
        ledger = Ledger(self._rank)
        topic = f"{self._name}/{ledger.count(self._name)}"
        ledger.post(topic, said.encode())
        topics = [(topic, rank) for rank in self._ranks]
        return [one.decode() for one in ledger.wait(topics, self._limit_s, "to come to a meeting")]
