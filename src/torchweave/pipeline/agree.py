"""IDEA: ranks that were given different things say so at once; else one would wait for what another never sends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from torchweave.errors import UsageError
from torchweave.pipeline.asked import Asked
from torchweave.pipeline.batch import Microbatches, look_of
from torchweave.pipeline.faults import Guard, Where
from torchweave.pipeline.rig import Rig
from torchweave.schedule.plan import Plan


def tell_all(own: dist.ProcessGroup, guard: Guard, mine: Any) -> list[Any]:
    """Return what each rank of a pipeline says, while it is built.

    Args:
        own: The pipeline's own group.
        guard: Names who does not say anything.
        mine: What this rank says, picklable.

    Raises:
        PipelineError: A rank is gone, or says nothing within the limit.
    """
    every: list[Any] = [None] * own.size()
    with guard.on_break():
        dist.all_gather_object(every, mine, group=own)
    return every


def check_alike(every: Sequence[Mapping[str, object]], ranks: Sequence[int]) -> None:
    """Raise where two ranks built a pipeline with different arguments.

    Args:
        every: For each rank its arguments, by the names that the user has for them.
        ranks: Their global ranks.

    Raises:
        UsageError: Two differ; every rank says the same.
    """
    for name, first in every[0].items():
        for rank, theirs in zip(ranks, every, strict=True):
            if theirs[name] != first:
                raise UsageError(
                    f"Every rank of a pipeline is built with the same {name}",
                    given=f"{first} on rank {ranks[0]}, {theirs[name]} on rank {rank}",
                    remedy="pass the same on every rank of the group",
                )


def agree_on_run(rig: Rig, plan: Plan, digest: str, inputs: Microbatches, asked: Asked) -> str:
    """Learn from the ranks with the first stage what comes in, and that they run the same.

    Args:
        rig: What the pipeline has on this rank.
        plan: What this rank runs.
        digest: A short name for the plan's actions.
        inputs: Of the first stage.
        asked: What the run is asked for.

    Returns:
        What the shapes of the transfers follow from, the same text on every rank.

    Raises:
        UsageError: Ranks were asked for different things.
        PipelineError: A rank does not begin.
    """
    said = []
    here = {"plan": plan.name, "num_microbatches": plan.num_microbatches, **asked.terms(), "order of actions": digest}
    for direction in range(plan.num_directions):
        begins = [m for m in range(plan.num_microbatches) if plan.direction_of(m) == direction]
        if not begins:
            continue
        first = plan.rank_of(0, begins[0])
        where = "the beginning of the step"
        if first == rig.rank:
            text = json.dumps([here, [look_of(inputs[m]) for m in begins]])
            for peer in range(len(rig.ranks)):
                if peer != rig.rank:
                    rig.wire.send_text(peer, text, Where(rig.ranks[peer], None, where, None))
        else:
            text = rig.wire.receive_text(first, Where(rig.ranks[first], None, where, None))
        theirs, looks = json.loads(text)
        for name, value in here.items():
            if theirs[name] != value:
                raise UsageError(
                    f"Every rank of a pipeline runs the same {name}",
                    given=f"{theirs[name]} on rank {rig.ranks[first]}, {value} on rank {rig.ranks[rig.rank]}",
                    remedy="call the same on every rank, with the same schedule and the same arguments",
                )
        said.append(json.dumps([theirs["order of actions"], looks]))
    return hashlib.sha256("\n".join(said).encode()).hexdigest()
