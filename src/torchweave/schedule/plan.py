"""IDEA: a plan says which rank does what in which order; idle time is no entry, it follows from what is waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchweave.schedule.action import BACKWARD, COMPUTE, FORWARD, INPUT, WEIGHT, Action, leaves

Rows = tuple[tuple[Action, ...], ...]
# what another action can wait for: F the output of a stage, I the gradient of its input, W that of its weights; with
# the stage and the microbatch
Result = tuple[str, int, int | None]


@dataclass(frozen=True)
class Plan:
    """The schedule of one training step, on every rank.

    A bidirectional plan (DualPipe) has two replicas of every stage, and its microbatches come from both ends: the
    first half of them enters at rank 0 (direction 0), the second half at the last rank (direction 1).

    Attributes:
        name: The schedule's name.
        ranks: For each rank its actions, in the order in which it begins them. There are no idle slots: a rank that
            cannot begin yet waits, for as long as the real times make it wait.
        placement: For each direction, for each stage, the rank that has it.
        num_microbatches: Of all directions together.
    """

    name: str
    ranks: Rows
    placement: tuple[tuple[int, ...], ...]
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """The number of stages that the model is cut into; a replica is not counted again."""
        return len(self.placement[0])

    @property
    def num_directions(self) -> int:
        """2 if microbatches come from both ends, else 1."""
        return len(self.placement)

    def has(self, stage: int, microbatch: int | None) -> bool:
        """Return whether there are such a stage and such a microbatch."""
        return 0 <= stage < self.num_stages and microbatch is not None and 0 <= microbatch < self.num_microbatches

    def direction_of(self, microbatch: int) -> int:
        """Return 0 for a microbatch that enters at rank 0's end, 1 for one that enters at the last rank's."""
        return microbatch * self.num_directions // self.num_microbatches

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """Return the rank that takes this microbatch through this stage.

        Args:
            stage: From 0.
            microbatch: From 0; it matters only where there are two directions.
        """
        return self.placement[self.direction_of(microbatch)][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that stand on a rank, ascending; over both directions."""
        return tuple(sorted({s for ranks in self.placement for s, home in enumerate(ranks) if home == rank}))


def result_of(leaf: Action) -> Result:
    """Return what a computing action gives; B and I give the same to the stage before."""
    return (INPUT if leaf.kind == BACKWARD else leaf.kind, leaf.stage, leaf.microbatch)


def inputs_of(leaf: Action, num_stages: int) -> tuple[Result, ...]:
    """Return the results that a computing action needs: its neighbour's, and those of its own stage.

    Args:
        leaf: An F, B, I or W action.
        num_stages: The number of stages of the model.
    """
    stage, kind, microbatch, _ = leaf
    if kind == FORWARD:
        return ((FORWARD, stage - 1, microbatch),) if stage else ()
    if kind == WEIGHT:
        return ((INPUT, stage, microbatch),)
    own = (FORWARD, stage, microbatch)
    return ((INPUT, stage + 1, microbatch), own) if stage < num_stages - 1 else (own,)


def placed(name: str, rows: Sequence[Sequence[Action]]) -> Plan:
    """Make a plan of actions alone, such as a file holds them, and find out what stands where.

    One action astray changes none of the answers: a stage or a microbatch is there if two actions name it, and a
    stage stands on the rank that has the most of it. A stage that stands on another rank for the second half of the
    microbatches makes the plan bidirectional.

    Args:
        name: The plan's name.
        rows: The actions of each rank.
    """
    ranks = tuple(tuple(row) for row in rows)
    found = [(leaf, rank) for rank, row in enumerate(ranks) for _, leaf in leaves(row) if leaf.kind in COMPUTE]
    num_stages = _count([leaf.stage for leaf, _ in found])
    num_microbatches = _count([leaf.microbatch or 0 for leaf, _ in found])
    votes = [[Counter[int]() for _ in range(num_stages)] for _ in range(2)]
    for leaf, rank in found:
        if leaf.stage < num_stages:
            votes[(leaf.microbatch or 0) * 2 >= num_microbatches][leaf.stage][rank] += 1
    first, second = (tuple(_winner(vote) for vote in half) for half in votes)
    mirrored = first != second and first == second[::-1]
    both = tuple(_winner(one + other) for one, other in zip(*votes, strict=True))
    return Plan(name, ranks, (first, second) if mirrored else (both,), num_microbatches)


def _count(numbers: Sequence[int]) -> int:
    """Return how many there are, from 0 to the largest that is named twice; no more than there are actions."""
    named = Counter(numbers).items()
    return 1 + max((number for number, times in named if times > 1 and number < len(numbers)), default=0)


def _winner(votes: Counter[int]) -> int:
    return votes.most_common(1)[0][0] if votes else 0
