"""IDEA: a pass is a small function from plan to plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchweave.schedule.action import BACKWARD, COMPUTE, FORWARD, INPUT, REDUCE_GRAD, WEIGHT, Action, pair
from torchweave.schedule.plan import Plan, Result, result_of
from torchweave.schedule.transfers import transfer_of
from torchweave.schedule.walk import Walk, gifts_of, needs_of


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
    other, the two stay apart. That nothing blocks does not make it faster: in 1F1B a pair often waits longer than its
    halves would (`simulate` tells), and a schedule made for pairs is better: interleaved-pairs, dualpipev, dualpipe.

    Args:
        plan: A valid plan of computing actions.
    """
    rows = [_side_by_side(row) for row in plan.ranks]
    walk = Walk(rows, lambda action: needs_of(action, plan.num_stages), gifts_of)
    while True:
        for _ in walk:
            pass
        waiting = next(((rank, a) for rank, a in walk.heads() if any(walk.missing(h) is None for h in a.parts)), None)
        if waiting is None:
            break
        rank, action = waiting
        place = walk.places[rank]
        rows[rank][place : place + 1] = sorted(action.parts, key=lambda half: walk.missing(half) is not None)
        walk.look_again(rank)
    return replace(plan, ranks=tuple(tuple(row) for row in rows))


def _side_by_side(row: Sequence[Action]) -> list[Action]:
    """Return a rank's actions with every neighbouring F and B of two microbatches as a pair, from the left."""
    paired: list[Action] = []
    for action in row:
        last = paired[-1] if paired else None
        if last and last.microbatch != action.microbatch and {last.kind, action.kind} == {FORWARD, BACKWARD}:
            paired[-1] = pair(last, action) if last.kind == FORWARD else pair(action, last)
        else:
            paired.append(action)
    return paired


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
        plan: A valid plan of computing actions, perhaps with REDUCE_GRAD.

    Source: the idea is that of torch.distributed.pipelining.
    """
    rows: list[list[Action]] = [[] for _ in plan.ranks]
    places = [0] * plan.num_ranks
    here: list[set[Result]] = [set() for _ in plan.ranks]  # what each rank has
    waiting = [rank for rank, row in enumerate(plan.ranks) if row]
    while waiting:
        before = sum(places)
        for rank in waiting:
            action = plan.ranks[rank][places[rank]]
            if not here[rank].issuperset(needs_of(action, plan.num_stages)):
                continue
            places[rank] += 1
            rows[rank].append(action)
            for leaf in action.leaves():
                here[rank].add(result_of(leaf))
                if transfer := transfer_of(leaf, plan):
                    rows[rank].append(transfer.send)
                    rows[transfer.receiver].append(transfer.receive)
                    here[transfer.receiver].add(result_of(leaf))
        if sum(places) == before:
            raise ValueError(f"{plan.name} blocks; torchweave.schedule.check says where")
        waiting = [rank for rank in waiting if places[rank] < len(plan.ranks[rank])]
    return replace(plan, ranks=tuple(tuple(row) for row in rows))


def _by_rank(plan: Plan, change: Callable[[Sequence[Action]], list[Action]]) -> Plan:
    return replace(plan, ranks=tuple(tuple(change(row)) for row in plan.ranks))
