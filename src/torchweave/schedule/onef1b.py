"""IDEA: one forward, one backward (1F1B): a backward runs as soon as it can, so that few activations are alive."""

from __future__ import annotations

from torchweave.schedule.action import Action


def one_f_one_b(num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank: a warm-up of forwards, alternation, then the backwards that are left.

    Args:
        num_ranks: Ranks, one stage each.
        num_microbatches: At least 1.

    Source: PipeDream, https://arxiv.org/abs/1806.03377, with the flush of https://arxiv.org/abs/2006.09503.
    """
    return tuple(_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    ahead = min(num_ranks - 1 - rank, num_microbatches)  # forwards before the first backward can be here
    actions = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(num_microbatches):
        if m + ahead < num_microbatches:
            actions.append(Action(rank, "F", m + ahead))
        actions.append(Action(rank, "B", m))
    return tuple(actions)
