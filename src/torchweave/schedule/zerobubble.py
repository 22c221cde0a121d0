"""IDEA: zero bubble: a weight gradient waits for nobody, so it fills the time in which a rank would wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from torchweave.schedule.action import Action

_Step = tuple[Literal["F", "I", "W"], int]

_F0: _Step = ("F", 0)
_F1: _Step = ("F", 1)
_I0: _Step = ("I", 0)
_I1: _Step = ("I", 1)
_W0: _Step = ("W", 0)
_W1: _Step = ("W", 1)


def zb_h1(num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank for ZB-H1: 1F1B with weight gradients put off, in 1F1B's memory.

    Rank r puts them off by r microbatches: with the forwards that it runs ahead, that makes as many activations on
    every rank.

    Args:
        num_ranks: Ranks, one stage each.
        num_microbatches: At least 1.

    Source: Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 2.
    """
    return tuple(_zb_h1_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))


def _zb_h1_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    actions = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(num_microbatches):
        if m + ahead < num_microbatches:
            actions.append(Action(rank, "F", m + ahead))
        actions.append(Action(rank, "I", m))
        if m >= rank:
            actions.append(Action(rank, "W", m - rank))
    actions += [Action(rank, "W", m) for m in range(max(0, num_microbatches - rank), num_microbatches)]
    return tuple(actions)


def zbv(num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank for ZB-V: the stages go down the ranks and back up.

    Without communication, and with F, I and W of the same length, no rank ever waits after its first action.

    Args:
        num_ranks: Ranks, two stages each: r and 2 * num_ranks - 1 - r.
        num_microbatches: At least 1.

    Source: Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 6.
    """
    return tuple(
        tuple(
            action
            for action in _zbv_rank(rank, num_ranks, max(2 * num_ranks - 1, num_microbatches))
            if action.microbatch is not None and action.microbatch < num_microbatches
        )
        for rank in range(num_ranks)
    )


def _zbv_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return the actions of a rank for enough microbatches to fill the pipeline."""
    stages = (rank, 2 * num_ranks - 1 - rank)
    counts: Counter[_Step] = Counter()

    def steps() -> Iterator[_Step]:
        yield from [_F0] * (2 * (num_ranks - rank) - 1)
        yield from [_F1, _F0] * rank
        yield from [_F1, _I1, _W1] * (num_ranks - rank)
        while counts[_F1] < num_microbatches:
            yield from [_F0] * (counts[_F0] < num_microbatches)
            yield from [_I0, _W0, _F1, _I1, _W1]
        yield from [_I0, _I1] * rank
        yield from [_I0, _W0] * (num_ranks - rank)
        yield from [_W1] * (num_microbatches - counts[_W1])
        yield from [_W0] * (num_microbatches - counts[_W0])

    actions = []
    for kind, chunk in steps():
        actions.append(Action(stages[chunk], kind, counts[kind, chunk]))
        counts[kind, chunk] += 1
    return actions
