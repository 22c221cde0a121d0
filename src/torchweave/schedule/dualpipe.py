"""IDEA: DualPipe: two replicas of every stage, microbatches from both ends, which meet in pairs on every rank."""

from __future__ import annotations

from torchweave.schedule.action import Action
from torchweave.schedule.eight_steps import eight_steps


def dualpipe(num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank.

    Args:
        num_ranks: Ranks, an even number; rank r has stages r and num_ranks - 1 - r.
        num_microbatches: An even number, at least 2 * num_ranks; the first half enters at rank 0, the second half at
            the last rank.

    Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.2.1; https://github.com/deepseek-ai/DualPipe.
    """
    half = num_microbatches // 2
    lower = [eight_steps(rank, num_ranks // 2, 0, half, half) for rank in range(num_ranks // 2)]
    upper = [eight_steps(rank, num_ranks // 2, half, 0, half) for rank in reversed(range(num_ranks // 2))]
    return (*lower, *upper)
