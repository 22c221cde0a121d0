"""IDEA: which result goes from which rank to which."""

from __future__ import annotations

from typing import NamedTuple

from torchweave.schedule.action import FORWARD, GRADIENT, RECV_B, RECV_F, SEND_B, SEND_F, Action, Kind
from torchweave.schedule.plan import Plan


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
