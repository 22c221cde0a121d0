"""IDEA: which strategy runs a kind of pair: what its record allows, agreed between the ranks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from torchweave.engine.agreement import agree, share_times
from torchweave.engine.channels import Channel
from torchweave.engine.hazards import Hazards, module_states
from torchweave.engine.order import REGION, WAIT, Action, Record, woven
from torchweave.engine.play import Strands
from torchweave.engine.reorder import Reorder, is_worth_it
from torchweave.engine.strands import defined_at
from torchweave.engine.trial import REORDERED, SERIAL, Trial
from torchweave.errors import NotWeavableError, UsageError

AUTO = "auto"
WEAVING = ("turns", "streams")
STRATEGIES = (AUTO, SERIAL, *WEAVING)


def check_strategy(strategy: str) -> None:
    """Check a strategy where it is given, and not only when the first pair runs.

    Raises:
        UsageError: There is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise UsageError(
            "strategy is one of " + ", ".join(STRATEGIES), given=repr(strategy), remedy="leave it out for 'auto'"
        )


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
        weights_wait: Whether the backward's weight gradients may wait for the next communication to start.
        places: Where forward and backward are defined.
        trial: What `auto` takes.
        reorder: What has come of the search for another order of turns; None where there is none.
    """

    backward: Record
    forward: Record
    channels: tuple[Channel, ...]
    agreements: dict[str, int]
    order: tuple[str, ...]
    refusals: dict[str, str]
    stateful: tuple[weakref.ref[nn.Module], ...]
    steps_optimizer: bool
    weights_wait: bool
    places: tuple[str, str]
    trial: Trial
    reorder: Reorder | None

    def is_current(self) -> bool:
        """Whether the groups are still those of the record."""
        return all(channel.is_alive() for channel in self.channels)

    def stateful_objects(self) -> list[Any]:
        """Return the objects whose `_training_state` belongs to a strand."""
        modules = (reference() for reference in self.stateful)
        return [owner for module in modules if module is not None for owner in module_states(module)]

    def strategy_for(self, strategy: str) -> str:
        """Return a strategy that is asked for by its name, where it can run this kind of pair.

        Raises:
            NotWeavableError: It cannot.
        """
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
    # what `auto` takes is agreed as well: what there is to hide on one rank may be nothing on another
    vetoes = {
        "turns": veto,
        "streams": veto or conduct.streams_veto or hazards.streams_veto,
        **{f"{AUTO} {strategy}": why for strategy, why in _pointless(backward, forward, hazards).items()},
    }
    refusals = dict(agree(channels, plan, vetoes, conduct.rank))
    agreements = {channel.name: channel.num_agreements for channel in channels}
    pointless = {strategy: refusals.pop(f"{AUTO} {strategy}") for strategy in WEAVING}
    why_not = {strategy: refusals[strategy] or pointless[strategy] for strategy in WEAVING}
    candidates = (*(strategy for strategy in WEAVING if not why_not[strategy]), SERIAL)
    share = share_times(channels, agreements, conduct.rank)
    reorder = None
    if WEAVING[0] in candidates[:-1] and is_worth_it(backward, forward):
        reorder = Reorder(backward, forward, channels, agreements, share, conduct.rank, conduct.limit_s)
    return Decision(
        backward,
        forward,
        channels,
        agreements,
        _issuers(plan, backward),
        refusals,
        tuple(weakref.ref(module) for module in hazards.stateful),
        hazards.steps_optimizer,
        # FSDP2 reduces a module's gradients when it has left its backward; others communicate from a weight's hook
        not (hazards.stateful or hazards.steps_optimizer or conduct.weights_communicate),
        (defined_at(strands.forward.call), defined_at(strands.backward.call)),
        # what weaves comes first: it is tried at once
        Trial(candidates, why_not[WEAVING[0]], share, conduct.limit_s, reorder),
        reorder,
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """How `auto` runs pairs of one kind.

    Args:
        forward: Where the forward callable is defined.
        backward: Where the backward callable is defined.
        strategy: What runs such pairs now.
        reason: Why, in numbers.
        times_ms: What a pair takes by each strategy that was tried, ms: the slowest rank's, of host and device the
            larger.
        num_pairs: How many pairs `auto` has run so far, the recorded one left out.
        num_crossings: How often the forward and the backward wait for communication.
    """

    forward: str
    backward: str
    strategy: str
    reason: str
    times_ms: dict[str, float]
    num_pairs: int
    num_crossings: tuple[int, int]

    @classmethod
    def of(cls, decision: Decision) -> Choice:
        """Return what is known of a kind of pair."""
        trial = decision.trial
        order = decision.reorder.told if decision.reorder is not None and trial.choice == REORDERED else ""
        crossings = tuple(
            sum(step[0] in (WAIT, REGION) for step in one) for one in (decision.forward, decision.backward)
        )
        return cls(
            *decision.places,
            trial.choice,
            f"{trial.reason}; {order}" if order else trial.reason,
            dict(trial.times_ms),
            trial.num_pairs,
            (crossings[0], crossings[1]),
        )

    def __str__(self) -> str:
        return (
            f"{self.strategy}: forward {self.forward}, backward {self.backward}, "
            f"{self.num_crossings[0]} and {self.num_crossings[1]} crossings, {self.num_pairs} pairs; {self.reason}"
        )


def _pointless(backward: Record, forward: Record, hazards: Hazards) -> dict[str, str]:
    """Say why a strategy that could run a pair would gain nothing, by its name; "" where it might."""
    idle = "" if _crosses(backward) or _crosses(forward) else "no strand waits for communication: nothing to hide"
    # without communication free strands still launch at the same time, if the host is what limits a device
    return {"turns": idle, "streams": hazards.no_room if torch.cuda.is_initialized() else idle}


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
