"""IDEA: a plan of forwards alone: each rank runs the deepest forward that it has, so that little waits."""

from __future__ import annotations

from heapq import heappop, heappush

from torchweave.schedule.action import FORWARD, Action
from torchweave.schedule.counts import check_count
from torchweave.schedule.plan import Plan


def forwards(placement: tuple[tuple[int, ...], ...], num_ranks: int, num_microbatches: int) -> Plan:
    """Return a plan that takes every microbatch through every stage once.

    Its order is that of a run in which every forward takes one slot, so nothing in it can block.

    Args:
        placement: For each direction, for each stage, its rank.
        num_ranks: Ranks.
        num_microbatches: At least 1, of all directions together.

    Raises:
        UsageError: The number of microbatches cannot be.
    """
    check_count("microbatches", num_microbatches)
    plan = Plan("forwards", (), placement, num_microbatches)
    ready: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for microbatch in range(num_microbatches):
        heappush(ready[plan.rank_of(0, microbatch)], (0, microbatch))
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    while any(ready):
        done = [(rank, heappop(heap)) for rank, heap in enumerate(ready) if heap]
        for rank, (depth, microbatch) in done:
            stage = -depth
            rows[rank].append(Action(stage, FORWARD, microbatch))
            if stage + 1 < plan.num_stages:
                heappush(ready[plan.rank_of(stage + 1, microbatch)], (depth - 1, microbatch))
    return Plan(plan.name, tuple(map(tuple, rows)), placement, num_microbatches)
