"""IDEA: GPipe: all forwards, then all backwards; the simplest schedule, with the most activations alive."""

from __future__ import annotations

from torchweave.schedule.action import Action


def gpipe(num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank.

    Args:
        num_ranks: Ranks, one stage each.
        num_microbatches: At least 1.

    Source: GPipe, https://arxiv.org/abs/1811.06965. Backwards go in the order of the forwards, as in
        torch.distributed.pipelining.
    """
    return tuple(
        (
            *(Action(rank, "F", m) for m in range(num_microbatches)),
            *(Action(rank, "B", m) for m in range(num_microbatches)),
        )
        for rank in range(num_ranks)
    )
