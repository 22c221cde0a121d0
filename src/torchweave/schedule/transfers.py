"""IDEA: what goes from rank to rank, and in which order, so that nothing can block."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torchweave.schedule.action import FORWARD, GRADIENT, RECV_B, RECV_F, SEND_B, SEND_F, Action, Kind
from torchweave.schedule.plan import Plan, Result, result_of
from torchweave.schedule.walk import needs_of


class Transfer(NamedTuple):
    """What a result causes that another rank needs.

    Attributes:
        send: The action of the rank that has the result.
        receive: The action of the rank that needs it.
        sender: The one rank.
        receiver: The other.
    """

    send: Action
    receive: Action
    sender: int
    receiver: int


def transfer_of(leaf: Action, plan: Plan) -> Transfer | None:
    """Return the transfer that a computing action causes; None where the next stage stands on the same rank.

    Args:
        leaf: An action that is no pair.
        plan: Says where the stages stand.
    """
    if leaf.kind != FORWARD and leaf.kind not in GRADIENT:
        return None
    microbatch, target = leaf.microbatch, leaf.stage + (1 if leaf.kind == FORWARD else -1)
    if microbatch is None or not (plan.has(leaf.stage, microbatch) and plan.has(target, microbatch)):
        return None
    sender, receiver = plan.rank_of(leaf.stage, microbatch), plan.rank_of(target, microbatch)
    if sender == receiver:
        return None
    kinds: tuple[Kind, Kind] = (SEND_F, RECV_F) if leaf.kind == FORWARD else (SEND_B, RECV_B)
    send, receive = Action(leaf.stage, kinds[0], microbatch), Action(target, kinds[1], microbatch)
    return Transfer(send, receive, sender, receiver)


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
