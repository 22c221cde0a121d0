"""IDEA: a pass is a small function from plan to plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchweave.schedule.action import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    GRADIENT,
    INPUT,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    pair,
)
from torchweave.schedule.plan import Done, Plan, inputs_of, result_of


def only_compute(plan: Plan) -> Plan:
    """Return the plan without point-to-point, and without what FSDP and data parallelism add."""
    return _by_rank(plan, lambda row: [action for action in row if action.kind in COMPUTE])


def split_backward(plan: Plan) -> Plan:
    """Return the plan with each B outside a pair as I and W, one after the other."""

    def halves(action: Action) -> tuple[Action, ...]:
        if action.kind != BACKWARD:
            return (action,)
        return action._replace(kind=INPUT), action._replace(kind=WEIGHT)

    return _by_rank(plan, lambda row: [half for action in row for half in halves(action)])


def merge_backward(plan: Plan) -> Plan:
    """Return the plan with each I, and the W of the same microbatch right behind it, as one B."""

    def merged(row: Sequence[Action]) -> list[Action]:
        done: list[Action] = []
        for action in row:
            if action.kind == WEIGHT and done and done[-1] == action._replace(kind=INPUT):
                done[-1] = action._replace(kind=BACKWARD)
            else:
                done.append(action)
        return done

    return _by_rank(plan, merged)


def take_pairs_apart(plan: Plan) -> Plan:
    """Return the plan with the forward and then the backward of each pair: the serial baseline."""
    return _by_rank(plan, lambda row: [leaf for action in row for leaf in action.leaves()])


def merge_pairs(plan: Plan) -> Plan:
    """Return the plan with a forward and a backward that stand side by side as a pair, wherever that cannot block.

    A pair begins when both its halves can. Where a rank would wait for one half while another rank waits for the
    other, the two stay apart.

    Args:
        plan: A valid plan of computing actions.
    """
    rows = [_paired(row) for row in plan.ranks]
    places, done = [0] * plan.num_ranks, set[Done]()

    def is_ready(leaf: Action) -> bool:
        return all(wanted in done for wanted in inputs_of(leaf, plan.num_stages))

    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row) and all(is_ready(leaf) for leaf in row[places[rank]].leaves()):
                done.update(result_of(leaf) for leaf in row[places[rank]].leaves())
                places[rank], moved = places[rank] + 1, True
        if not moved:
            _part_one(rows, places, is_ready)
    return replace(plan, ranks=tuple(tuple(row) for row in rows))


def _paired(row: Sequence[Action]) -> list[Action]:
    paired: list[Action] = []
    for action in row:
        last = paired[-1] if paired else None
        if last is not None and last.microbatch != action.microbatch and {last.kind, action.kind} == {"F", "B"}:
            paired[-1] = pair(last, action) if last.kind == FORWARD else pair(action, last)
        else:
            paired.append(action)
    return paired


def _part_one(rows: list[list[Action]], places: list[int], is_ready: Callable[[Action], bool]) -> None:
    """Take one pair apart that waits for one of its halves while the other one could run."""
    for row, place in zip(rows, places, strict=True):
        leaves = row[place].leaves() if place < len(row) else ()
        if len(leaves) == 2 and any(map(is_ready, leaves)):
            row[place : place + 1] = sorted(leaves, key=is_ready, reverse=True)
            return
    raise AssertionError("a plan that was checked cannot block without a pair")


def add_reduce_grad(plan: Plan) -> Plan:
    """Return the plan with REDUCE_GRAD behind the last weight gradient that each stage of a rank gets."""

    def reduced(row: Sequence[Action]) -> list[Action]:
        left = Counter(leaf.stage for action in row for leaf in action.leaves() if leaf.kind in (BACKWARD, WEIGHT))
        done: list[Action] = []
        for action in row:
            if action.kind == REDUCE_GRAD:
                continue
            done.append(action)
            for leaf in action.leaves():
                left[leaf.stage] -= leaf.kind in (BACKWARD, WEIGHT)
                if leaf.kind in (BACKWARD, WEIGHT) and not left[leaf.stage]:
                    done.append(Action(leaf.stage, REDUCE_GRAD))
        return done

    return _by_rank(plan, reduced)


def add_send_recv(plan: Plan) -> Plan:
    """Return the plan with point-to-point: a SEND right behind its result, the RECV as early as the order allows.

    The ranks are walked through in step, one action each in turn. What goes to another rank is entered at that moment
    with both, so any two ranks have their transfers in the same order, and all transfers have one order: nothing can
    block, even where a send waits until its receive has begun. A stage that stands on the same rank as the next one
    hands over without a transfer.

    Args:
        plan: A plan of computing actions, perhaps with REDUCE_GRAD.

    Raises:
        ValueError: The plan blocks; `check` says where.

    Source: the idea is that of torch.distributed.pipelining.
    """
    rows: list[list[Action]] = [[] for _ in plan.ranks]
    places = [0] * plan.num_ranks
    here: list[set[Done]] = [set() for _ in plan.ranks]  # what each rank has
    waiting = [rank for rank, row in enumerate(plan.ranks) if row]
    while waiting:
        before = sum(places)
        for rank in waiting:
            action = plan.ranks[rank][places[rank]]
            if not all(_is_here(leaf, here[rank], plan.num_stages) for leaf in action.leaves()):
                continue
            places[rank] += 1
            rows[rank].append(action)
            for leaf in action.leaves():
                here[rank].add(result_of(leaf))
                if transfer := transfer_of(leaf, plan):
                    send, receive, receiver = transfer
                    rows[rank].append(send)
                    rows[receiver].append(receive)
                    here[receiver].add(result_of(leaf))
        if sum(places) == before:
            raise ValueError(f"{plan.name} blocks; torchweave.schedule.check.check says where")
        waiting = [rank for rank in waiting if places[rank] < len(plan.ranks[rank])]
    return replace(plan, ranks=tuple(tuple(row) for row in rows))


def transfer_of(leaf: Action, plan: Plan) -> tuple[Action, Action, int] | None:
    """Return the SEND and the RECV that a computing action causes, and the receiving rank; None if it causes none.

    Args:
        leaf: An action that is no pair.
        plan: Says where the stages stand.
    """
    target = leaf.stage + (1 if leaf.kind == FORWARD else -1)
    if leaf.kind not in (FORWARD, *GRADIENT) or leaf.microbatch is None or not 0 <= target < plan.num_stages:
        return None
    receiver = plan.rank_of(target, leaf.microbatch)
    if receiver == plan.rank_of(leaf.stage, leaf.microbatch):
        return None
    if leaf.kind == FORWARD:
        return leaf._replace(kind=SEND_F), Action(target, RECV_F, leaf.microbatch), receiver
    return leaf._replace(kind=SEND_B), Action(target, RECV_B, leaf.microbatch), receiver


def _is_here(leaf: Action, here: set[Done], num_stages: int) -> bool:
    return leaf.kind not in COMPUTE or all(wanted in here for wanted in inputs_of(leaf, num_stages))


def _by_rank(plan: Plan, change: Callable[[Sequence[Action]], list[Action]]) -> Plan:
    return replace(plan, ranks=tuple(tuple(change(row)) for row in plan.ranks))
