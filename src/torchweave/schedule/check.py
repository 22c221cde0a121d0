"""IDEA: a plan that passes runs to its end and gives the right gradients; all faults are found, not the first alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchweave.errors import TorchweaveError
from torchweave.schedule.action import BACKWARD, COMPUTE, FORWARD, INPUT, P2P, WEIGHT, Action, leaves
from torchweave.schedule.blocking import Dependencies
from torchweave.schedule.memory import alive_during, check_limit
from torchweave.schedule.plan import Plan, Result
from torchweave.schedule.transfers import transfer_of

_NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a plan, and where.

    Attributes:
        rank: The rank whose row holds the fault, or lacks what is missing.
        place: The action in that row, counted from 0; None where something is missing.
        text: What is wrong, in one sentence without its full stop.
    """

    rank: int
    place: int | None
    text: str


class PlanError(TorchweaveError):
    """A plan cannot be run.

    Attributes:
        plan: The plan.
        faults: All that is wrong with it.
    """

    def __init__(self, plan: Plan, faults: tuple[Fault, ...]) -> None:
        self.plan, self.faults = plan, faults
        super().__init__(
            "A plan takes every microbatch forward and backward through every stage once, and never blocks",
            given=f"{plan.name}, with {len(faults)} fault{'s' * (len(faults) > 1)}",
            remedy="mend what is marked below",
        )

    def __str__(self) -> str:
        from torchweave.schedule.grid import marked

        return f"{super().__str__()}\n{marked(self.plan, self.faults)}"


def check(plan: Plan, max_activations: float | None = None) -> None:
    """Raise an error that shows every fault in the plan's grid, if it has one.

    Args:
        plan: A plan of computing actions alone, or with point-to-point.
        max_activations: The most activations that a rank may hold; None for any number.

    Raises:
        PlanError: The plan cannot be run.
        UsageError: The limit is not above 0.
    """
    if faults := faults_of(plan, max_activations):
        raise PlanError(plan, faults)


def faults_of(plan: Plan, max_activations: float | None = None) -> tuple[Fault, ...]:
    """Return everything that is wrong with a plan.

    What blocks only because something is missing or misplaced, which is a fault already, is not told again.

    Args:
        plan: A plan of computing actions alone, or with point-to-point.
        max_activations: The most activations that a rank may hold; None for any number.

    Raises:
        UsageError: The limit is not above 0.
    """
    check_limit(max_activations)
    found = [*_strange(plan), *_miscounted(plan), *_waiting(plan)]
    if any(action.kind in P2P for row in plan.ranks for action in row):
        found += _unmatched(plan)
    if max_activations is not None:
        found += _too_many_alive(plan, max_activations)
    return tuple(sorted(found, key=lambda fault: (fault.rank, fault.place is None, fault.place or 0)))


def _strange(plan: Plan) -> Iterator[Fault]:
    """Find actions of stages and microbatches that there are not, or on a rank that has them not."""
    standing = [plan.stages_of(rank) for rank in range(plan.num_ranks)]
    for rank, row in enumerate(plan.ranks):
        for place, leaf in leaves(row):
            if leaf.stage >= plan.num_stages:
                text = f"there is no stage {leaf.stage}, the last is {plan.num_stages - 1}"
            elif leaf.microbatch is not None and leaf.microbatch >= plan.num_microbatches:
                text = f"there is no microbatch {leaf.microbatch}, the last is {plan.num_microbatches - 1}"
            elif leaf.microbatch is None and leaf.stage not in standing[rank]:
                text = f"stage {leaf.stage} does not stand on rank {rank}"
            elif leaf.microbatch is not None and (home := plan.rank_of(leaf.stage, leaf.microbatch)) != rank:
                text = f"stage {leaf.stage} stands on rank {home}, not on rank {rank}"
            else:
                continue
            yield Fault(rank, place, f"{leaf}: {text}")


def _miscounted(plan: Plan) -> Iterator[Fault]:
    """Find forwards, input gradients and weight gradients that are missing, or there twice."""
    seen: set[Result] = set()
    for rank, row in enumerate(plan.ranks):
        for place, leaf in leaves(row):
            work = {(work, leaf.stage, leaf.microbatch) for work in _work(leaf)}
            if work & seen:
                names = _named({kind for kind, _, _ in work & seen})
                yield Fault(rank, place, f"{leaf}: the {names} of this microbatch is there already")
            seen |= work
    for microbatch in range(plan.num_microbatches):
        for stage in range(plan.num_stages):
            missing = {work for work in (FORWARD, INPUT, WEIGHT) if (work, stage, microbatch) not in seen}
            if missing:
                text = f"the {_named(missing)} of microbatch {microbatch} through stage {stage} is missing"
                yield Fault(plan.rank_of(stage, microbatch), None, text)


def _named(work: set[str]) -> str:
    """Name one or several of F, I and W; I and W together are the backward."""
    if work >= {INPUT, WEIGHT}:
        work = (work - {INPUT, WEIGHT}) | {BACKWARD}
    return " and the ".join(_NAMES[kind] for kind in sorted(work, reverse=True))


def _work(leaf: Action) -> tuple[str, ...]:
    if leaf.kind == BACKWARD:
        return INPUT, WEIGHT
    return (leaf.kind,) if leaf.kind in COMPUTE else ()


def _waiting(plan: Plan) -> Iterator[Fault]:
    """Find what stands before what it needs, and where ranks wait for each other in a circle."""
    dependencies = Dependencies(plan)
    for wait in dependencies.too_early():
        action = plan.ranks[wait.rank][wait.place]
        yield Fault(wait.rank, wait.place, f"{action} stands before what it needs: {wait.wanted}")
    for wait in dependencies.circles():
        action = plan.ranks[wait.rank][wait.place]
        text = f"waits for ever: for {wait.wanted}, which rank {wait.peer} comes to only behind {wait.head}"
        yield Fault(wait.rank, wait.place, f"{action} {text}")


def _unmatched(plan: Plan) -> Iterator[Fault]:
    """Find sends and receives that are missing, there twice, or of no use."""
    wanted: dict[tuple[int, Action], Action] = {}
    for row in plan.ranks:
        for _, leaf in leaves(row):
            if transfer := transfer_of(leaf, plan):
                wanted[transfer.sender, transfer.send] = leaf
                wanted[transfer.receiver, transfer.receive] = leaf
    seen: set[tuple[int, Action]] = set()
    for rank, row in enumerate(plan.ranks):
        for place, action in enumerate(row):
            if action.kind not in P2P:
                continue
            if (rank, action) in seen:
                yield Fault(rank, place, f"{action} is there already")
            elif (rank, action) not in wanted:
                yield Fault(rank, place, f"{action}: nothing goes this way between two ranks")
            seen.add((rank, action))
    for (rank, action), leaf in wanted.items():
        if (rank, action) not in seen:
            yield Fault(rank, None, f"{action} is missing, for the result of {leaf}")


def _too_many_alive(plan: Plan, limit: float) -> Iterator[Fault]:
    """Find where each rank first holds more activations than it may."""
    for rank, row in enumerate(plan.ranks):
        alive = list(alive_during(row))
        place = next((place for place, number in enumerate(alive) if number > limit), None)
        if place is not None:
            text = f"{alive[place]} activations are alive here, later {max(alive)} at most; the limit is {limit:g}"
            yield Fault(rank, place, text)
