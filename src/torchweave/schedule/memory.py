"""IDEA: how many activations are alive at once follows from the order of a rank's actions alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweave.errors import UsageError
from torchweave.schedule.action import BACKWARD, FORWARD, WEIGHT, Action
from torchweave.schedule.plan import Plan

_LAST = frozenset({BACKWARD, WEIGHT})  # what an activation is kept for


def peak_activations(plan: Plan) -> tuple[int, ...]:
    """Return, for each rank, the most activations that are alive at once.

    One activation is what a stage keeps of one microbatch: from the beginning of its F to the end of its B, or of its W
    where the backward is split. A pair holds both its forward's and its backward's.

    Args:
        plan: Any plan.
    """
    return tuple(max(alive_during(row), default=0) for row in plan.ranks)


def alive_during(row: Sequence[Action]) -> Iterator[int]:
    """Yield, for each action of a rank, how many activations are alive while it runs.

    Args:
        row: The actions of a rank, in their order.
    """
    alive = 0
    for action in row:
        leaves = action.leaves()
        for leaf in leaves:
            alive += leaf.kind == FORWARD
        yield alive
        for leaf in leaves:
            alive -= leaf.kind in _LAST


def check_limit(max_activations: float | None) -> None:
    """Refuse a limit that no plan can keep, or that limits nothing because it is no number.

    Args:
        max_activations: The most activations that a rank may hold; None for any number.

    Raises:
        UsageError: It is not above 0.
    """
    if max_activations is not None and not max_activations > 0:
        raise UsageError(
            "The most activations that a rank may hold are a number above 0",
            given=f"{max_activations:g}",
            remedy="leave the limit out, or give a larger one",
        )
