"""IDEA: DualPipeV: the stages go down the ranks and back up, so one copy of the weights meets itself in pairs."""

from __future__ import annotations

from torchweave.schedule.action import Action
from torchweave.schedule.eight_steps import eight_steps


def dualpipev(num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank.

    Args:
        num_ranks: Ranks, two stages each: r and 2 * num_ranks - 1 - r.
        num_microbatches: At least 2 * num_ranks.

    Source: https://github.com/deepseek-ai/DualPipe, where it is described as DualPipe cut in half.
    """
    return tuple(eight_steps(rank, num_ranks, 0, 0, num_microbatches) for rank in range(num_ranks))
