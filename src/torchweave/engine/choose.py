"""IDEA: which strategy runs a kind of pair: what its record allows, agreed between the ranks."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import nn

from torchweave.engine.agreement import agree
from torchweave.engine.channels import Channel
from torchweave.engine.hazards import Hazards, module_states
from torchweave.engine.order import REGION, WAIT, Action, Record, woven
from torchweave.engine.play import Strands
from torchweave.errors import NotWeavableError

STRATEGIES = ("auto", "serial", "turns", "streams")


class Decision(NamedTuple):
    """What is known of a kind of pair after its first, serial run.

    Attributes:
        backward: The backward strand's record.
        forward: The forward strand's record.
        channels: What the pair communicates on.
        agreements: The number of this kind's agreement on each channel: what the kind is called on every rank.
        order: Name of the strand that issues each operation, in the woven order.
        refusals: Why a strategy cannot run this kind, by its name; "" where it can.
        stateful: Modules that remember in which pass they are.
        steps_optimizer: Whether an optimizer stepped inside the backward.
        choice: What `auto` takes.
        reason: Why it takes that.
    """

    backward: Record
    forward: Record
    channels: tuple[Channel, ...]
    agreements: dict[str, int]
    order: tuple[str, ...]
    refusals: dict[str, str]
    stateful: tuple[weakref.ref[nn.Module], ...]
    steps_optimizer: bool
    choice: str
    reason: str

    def is_current(self) -> bool:
        """Whether the groups are still those of the record."""
        return all(channel.is_alive() for channel in self.channels)

    def stateful_objects(self) -> list[Any]:
        """Return the objects whose `_training_state` belongs to a strand."""
        modules = (reference() for reference in self.stateful)
        return [owner for module in modules if module is not None for owner in module_states(module)]

    def strategy_for(self, strategy: str) -> str:
        """Return the strategy that runs when `strategy` is asked for.

        Raises:
            NotWeavableError: It cannot run this kind of pair.
        """
        if strategy == "auto":
            return self.choice
        if refusal := self.refusals.get(strategy, ""):
            raise NotWeavableError(
                f"Strategy {strategy!r} must not change what a pair computes",
                given=refusal,
                remedy="use strategy='auto' or 'serial', or take away what is named",
            )
        return strategy


def decide(strands: Strands, hazards: Hazards) -> Decision:
    """Agree with the other ranks on what may run a kind of pair, from its first run.

    Args:
        strands: Both strands after their serial run.
        hazards: What was seen meanwhile.
    """
    conduct = strands.conduct
    backward, forward = tuple(strands.backward.met), tuple(strands.forward.met)
    channels = tuple(conduct.channels.values())
    plan = woven(backward, forward)
    veto = conduct.veto or hazards.veto
    idle = "" if _crosses(backward) and _crosses(forward) else "a strand waits for no communication: nothing to hide"
    # what `auto` takes is agreed as well: what there is to hide on one rank may be nothing on another
    vetoes = {"turns": veto, "streams": veto or conduct.streams_veto or hazards.streams_veto, "auto": veto or idle}
    refusals = dict(agree(channels, plan, vetoes, conduct.rank))
    agreements = {channel.name: channel.num_agreements for channel in channels}
    reason = refusals.pop("auto")
    choice = "serial" if reason else "turns"
    reason = reason or "both strands wait for communication"
    stateful = tuple(weakref.ref(module) for module in hazards.stateful)
    return Decision(
        backward,
        forward,
        channels,
        agreements,
        _issuers(plan, backward),
        refusals,
        stateful,
        hazards.steps_optimizer,
        choice,
        reason,
    )


def _crosses(record: Record) -> bool:
    return any(step[0] in (WAIT, REGION) for step in record)


def _issuers(plan: tuple[Action, ...], backward: Record) -> tuple[str, ...]:
    """Name the strand of each issue: on every channel the serial run numbers the backward's operations first."""
    counts: dict[str, int] = {}
    for operation, channel in backward:
        if operation not in (WAIT, REGION):
            counts[str(channel)] = counts.get(str(channel), 0) + 1
    return tuple(
        "backward" if action.serial < counts.get(action.channel, 0) else "forward" for action in plan if action.channel
    )
