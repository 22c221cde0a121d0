"""IDEA: when each action of a plan begins and ends, if every rank goes on as soon as it has what it needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchweave.schedule.action import COMPUTE, FORWARD, INPUT, RECEIVES, RECV_F, Action
from torchweave.schedule.costs import Costs
from torchweave.schedule.memory import peak_activations
from torchweave.schedule.passes import add_send_recv, only_compute, take_pairs_apart
from torchweave.schedule.plan import Plan
from torchweave.schedule.walk import Walk, gifts_of, needs_of


class Span(NamedTuple):
    """When an action runs.

    Attributes:
        action: The action.
        begin: From the step's begin, in the unit of the costs.
        end: The same.
    """

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        plan: What was simulated: computing actions; pairs too if woven.
        ranks: For each rank, its actions in time.
    """

    plan: Plan
    ranks: tuple[tuple[Span, ...], ...]

    @cached_property
    def step_time(self) -> float:
        """The time from the step's begin to the end of its last action."""
        return max((row[-1].end for row in self.ranks if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time in which it runs an action."""
        return tuple(sum(span.end - span.begin for span in row) for row in self.ranks)

    @cached_property
    def bubble_shares(self) -> tuple[float, ...]:
        """For each rank, the share of the step in which it waits."""
        return tuple(1 - busy / self.step_time if self.step_time else 0.0 for busy in self.busy)

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they wait."""
        return sum(self.bubble_shares) / len(self.ranks)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most activations of one stage and one microbatch that are alive at once."""
        return peak_activations(self.plan)


def simulate(plan: Plan, costs: Costs | None = None, *, woven: bool = True) -> Simulation:
    """Simulate a step.

    A rank runs its actions in the plan's order, one at a time, each as soon as the rank is free and its inputs are
    there. Sends and receives happen beside computation, and take `costs.p2p` from rank to rank, from when the result is
    there and the receive has begun, which a rank does between two actions, where `add_send_recv` says. A pair begins
    when both its halves can, and gives both results at its end.

    Args:
        plan: A valid plan; point-to-point in it is left out.
        costs: What actions cost; None for F = 1, B = 2, W = 1 and no communication.
        woven: Whether pairs are woven; if not, each is its forward and then its backward.

    Raises:
        UsageError: The costs do not fit the plan's stages.
        ValueError: The plan is not valid; `torchweave.schedule.check` says where.
    """
    costs = costs or Costs()
    plan = only_compute(plan if woven else take_pairs_apart(plan))
    return Simulation(plan, timeline(plan, costs.table(plan.num_stages).of, costs.p2p))


def timeline(plan: Plan, duration: Callable[[Action], float], p2p: float = 0.0) -> tuple[tuple[Span, ...], ...]:
    """Return, for each rank, when each of its actions runs.

    Args:
        plan: A valid plan of computing actions.
        duration: How long an action takes, such as one that was measured.
        p2p: How long a result takes to another rank, once it is there and its receive has begun.

    Raises:
        ValueError: The plan is not valid; `torchweave.schedule.check` says where.
    """
    receives = _receives(plan) if p2p else {}
    ends: dict[Hashable, tuple[float, int]] = {}  # of each result: when it was there, and on which rank
    free = [0.0] * plan.num_ranks
    rows: list[list[Span]] = [[] for _ in plan.ranks]
    walk = Walk(plan.ranks, lambda action: needs_of(action, plan.num_stages), gifts_of)
    for rank, action, needs in walk:
        begin = free[rank]
        for need in needs:
            end, home = ends[need]
            if home != rank and p2p:
                before = receives[need]
                end = max(end, rows[rank][before - 1].end if before else 0.0) + p2p
            if end > begin:
                begin = end
        end = free[rank] = begin + duration(action)
        rows[rank].append(Span(action, begin, end))
        for result in gifts_of(action):
            ends[result] = (end, rank)
    if any(True for _ in walk.heads()):
        raise ValueError(f"{plan.name} blocks; torchweave.schedule.check says where")
    return tuple(map(tuple, rows))


def _receives(plan: Plan) -> dict[Hashable, int]:
    """Return, for each result that goes to another rank, how many actions that rank begins before its receive."""
    found: dict[Hashable, int] = {}
    for row in add_send_recv(plan).ranks:
        before = 0
        for action in row:
            before += action.kind in COMPUTE
            if action.kind in RECEIVES:
                made_by = (FORWARD, action.stage - 1) if action.kind == RECV_F else (INPUT, action.stage + 1)
                found[(*made_by, action.microbatch)] = before
    return found
