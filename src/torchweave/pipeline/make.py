"""IDEA: `build` puts a pipeline together from a rank's chunks and a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from torchweave.engine.channels import group_timeout_s
from torchweave.engine.choose import check_strategy
from torchweave.errors import UsageError, described
from torchweave.pipeline.agree import check_alike, tell_all
from torchweave.pipeline.book import Book
from torchweave.pipeline.faults import Guard
from torchweave.pipeline.groups import device_of, own_group, own_store
from torchweave.pipeline.p2p import Wire
from torchweave.pipeline.places import placement_of, stages_of
from torchweave.pipeline.rig import Rig
from torchweave.pipeline.share import shared_buckets
from torchweave.pipeline.stage import Stage
from torchweave.pipeline.steps import Pipeline
from torchweave.pipeline.sums import Sums
from torchweave.schedule.plan import Plan

_ALONE_LIMIT_S = 1800.0
_MOST_LIMIT_S = 366 * 86400.0


def build(
    model_chunks: Sequence[nn.Module] | nn.Module,
    schedule: str | Plan = "dualpipev",
    group: dist.ProcessGroup | None = None,
    *,
    strategy: str = "auto",
    tied: Mapping[str, nn.Parameter] | None = None,
    limit_s: float | None = None,
    dynamic_shapes: bool = False,
    allow_nonfinite_loss: bool = False,
) -> Pipeline:
    """Put a pipeline together. Every rank of the group calls it.

    Args:
        model_chunks: The stages that this rank has, ascending (`stages_of` says which), in a list or a
            `torch.nn.ModuleList`: any modules, on their device, wrapped in DDP or FSDP2 or not. The outputs of one are
            the next one's arguments: a tensor; a tuple or list (by position); a dict (by name).
        schedule: gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev or dualpipe; or a plan of your own.
        group: The pipeline's ranks, in the order of the plan's; None for the default group.
        strategy: By which strategy pairs are woven, as for `weave`; `serial` takes them apart: forward, then backward.
        tied: Weights that stages on several ranks share, by names that are the same there, such as a first stage's
            embedding and a last stage's head. Their gradients are summed. Weights that stages of one rank share need
            no mention, nor do the two replicas of `dualpipe`.
        limit_s: How long anything is waited for, seconds; None for the group's timeout.
        dynamic_shapes: Learn in every step anew how the tensors between the stages look, for models where that
            follows from more than the shapes of the inputs.
        allow_nonfinite_loss: Go on where a microbatch's loss is NaN or infinite.

    Returns:
        The pipeline. The weights of `dualpipe`'s second replica, and tied ones, have been made equal to those of the
        lowest rank that holds them.

    Raises:
        UsageError: An argument is not what is allowed, or another one than on another rank.
        WaitLimitError: Another rank of the group does not call it.
        PipelineError: Another rank is gone.
    """
    chunks = _chunks(model_chunks)
    _check_arguments(schedule, strategy, tied, limit_s)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            "group is a process group that this rank is in",
            given=described(group),
            remedy="call build on the pipeline's ranks alone",
        )
    rank, num_ranks = (group.rank(), group.size()) if group is not None else (0, 1)
    mine = stages_of(schedule, rank, num_ranks, num_chunks=len(chunks))
    placement = placement_of(schedule, num_ranks, len(chunks))
    if len(mine) != len(chunks):
        raise UsageError(
            f"Rank {rank} of {num_ranks} has one chunk for each of its stages, {', '.join(map(str, mine))}",
            given=f"{len(chunks)} chunks",
            remedy="pass one module for each; torchweave.pipeline.stages_of says which stages a rank has",
        )
    num_stages = len(placement[0])
    stages = {index: Stage(index, num_stages, chunk) for index, chunk in zip(mine, chunks, strict=True)}
    device = device_of(chunks, group)
    limit_s = limit_s or (group_timeout_s(group) if group is not None else _ALONE_LIMIT_S)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        own = own_group(group, [range(num_ranks)], limit_s) if group is not None else None
        store = own_store(own) if own is not None else None
        guard = Guard(own, store, limit_s, device)
        if own is not None:
            given = {
                "schedule": schedule if isinstance(schedule, str) else schedule.name,
                "number of chunks": len(chunks),
                "dynamic_shapes": bool(dynamic_shapes),
            }
            check_alike(tell_all(own, guard, given), dist.get_process_group_ranks(own))
        buckets = shared_buckets(stages, placement, own, guard, dict(tied or {}), limit_s)
    wire = Wire(own, store, guard, device)
    rig = Rig(
        rank,
        tuple(dist.get_process_group_ranks(group)) if group is not None else (guard.rank,),
        stages,
        wire,
        Book(wire),
        guard,
        Sums(buckets, has_all=len(placement) > 1),
        device,
        strategy,
        object(),
        not allow_nonfinite_loss,
    )
    return Pipeline(rig, schedule, len(chunks), learns_always=dynamic_shapes)


def _chunks(given: object) -> list[nn.Module]:
    if isinstance(given, nn.Module) and not isinstance(given, nn.ModuleList):
        return [given]
    chunks: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise UsageError(
            "model_chunks are modules, one for each stage of this rank",
            given=", ".join(described(chunk) for chunk in chunks) or "none",
            remedy="pass a list of torch.nn.Module",
        )
    return chunks


def _check_arguments(schedule: object, strategy: str, tied: object, limit_s: object) -> None:
    if not isinstance(schedule, (str, Plan)):
        raise UsageError(
            "schedule is a name or a plan",
            given=described(schedule),
            remedy="pass a name such as 'dualpipev', or what torchweave.schedule.build.build returns",
        )
    check_strategy(strategy)
    if tied is not None and not (isinstance(tied, Mapping) and all(isinstance(name, str) for name in tied)):
        raise UsageError(
            "tied is a dict from names to weights",
            given=described(tied),
            remedy="pass {'embedding': stage.embedding.weight}, or leave it out",
        )
    if limit_s is not None and not (_is_number(limit_s) and 0 < limit_s <= _MOST_LIMIT_S):
        raise UsageError(
            "limit_s is a time above 0 seconds, and of a year at most", given=repr(limit_s), remedy="leave it out"
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
