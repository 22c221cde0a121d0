"""IDEA: which weights several ranks hold: DualPipe's replicas, and weights that the user ties by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchweave.errors import UsageError, described
from torchweave.pipeline.faults import Guard
from torchweave.pipeline.groups import own_group
from torchweave.pipeline.stage import Stage
from torchweave.pipeline.sums import Bucket, local_of

Placement = tuple[tuple[int, ...], ...]


def shared_buckets(
    stages: Mapping[int, Stage],
    placement: Placement,
    own: dist.ProcessGroup | None,
    guard: Guard,
    tied: Mapping[str, nn.Parameter],
    limit_s: float,
) -> list[Bucket]:
    """Return what this rank sums with other ranks, and make it equal on all of them.

    Args:
        stages: The stages of this rank.
        placement: For each direction, for each stage, its rank.
        own: The pipeline's own group; None for a pipeline of one rank.
        guard: Is told of the groups that are made.
        tied: Weights that are tied by name.
        limit_s: The timeout of these groups, seconds.

    Raises:
        UsageError: What is tied is no weight of a stage here, or looks otherwise on another rank.
    """
    for name, parameter in tied.items():
        if not isinstance(parameter, nn.Parameter) or not _stages_with(stages, parameter):
            raise UsageError(
                "A tied weight is a parameter of a stage on this rank",
                given=f"{name!r}: {described(parameter)}",
                remedy="pass the very parameter that the stage's module holds, after it was moved and wrapped",
            )
    if own is None:
        return []
    buckets = [*_tied(stages, own, tied, limit_s), *_mirrored(stages, placement, own, tied.values(), limit_s)]
    for bucket in buckets:
        guard.watch(bucket.group)
        _make_equal(bucket, stages)
    return buckets


def _tied(
    stages: Mapping[int, Stage], own: dist.ProcessGroup, tied: Mapping[str, nn.Parameter], limit_s: float
) -> list[Bucket]:
    looks = {name: f"{parameter.dtype}{list(parameter.shape)}" for name, parameter in tied.items()}
    every: list[dict[str, str]] = [{} for _ in range(own.size())]
    dist.all_gather_object(every, looks, group=own)
    buckets = []
    for name in sorted({name for theirs in every for name in theirs}):
        holders = [rank for rank, theirs in enumerate(every) if name in theirs]
        if len({every[rank][name] for rank in holders}) > 1:
            raise UsageError(
                "A tied weight looks the same on every rank",
                given=", ".join(f"{every[rank][name]} on rank {rank}" for rank in holders),
                remedy=f"tie only equal weights as {name!r}",
            )
        others = [[rank] for rank in range(own.size()) if rank not in holders]
        group = own_group(own, [holders, *others], limit_s)
        if group is not None and name in tied:
            buckets.append(Bucket(f"tied {name}", [tied[name]], group, _stages_with(stages, tied[name])))
    return buckets


def _mirrored(
    stages: Mapping[int, Stage],
    placement: Placement,
    own: dist.ProcessGroup,
    tied: Iterable[nn.Parameter],
    limit_s: float,
) -> list[Bucket]:
    """Return the buckets of a bidirectional plan, in which two ranks hold the same stages."""
    if len(placement) == 1:
        return []
    pairs = sorted({tuple(sorted({ranks[stage] for ranks in placement})) for stage in range(len(placement[0]))})
    group = own_group(own, pairs, limit_s)
    if group is None:
        return []
    taken = {id(parameter) for parameter in tied}
    buckets = []
    # from the last: a weight that two stages share is complete with the later one of them
    for index in sorted(stages):
        parameters = [p for p in stages[index].module.parameters() if p.requires_grad and id(p) not in taken]
        taken.update(id(parameter) for parameter in parameters)
        needed = frozenset(stage for parameter in parameters for stage in _stages_with(stages, parameter))
        if parameters:
            buckets.append(Bucket(f"stage {index}", parameters, group, needed))
    return buckets


def _stages_with(stages: Mapping[int, Stage], parameter: object) -> frozenset[int]:
    return frozenset(
        index for index, stage in stages.items() if any(each is parameter for each in stage.module.parameters())
    )


def _make_equal(bucket: Bucket, stages: Mapping[int, Stage]) -> None:
    """Give every rank of a bucket the values of the lowest."""
    tensors: Sequence[torch.Tensor] = bucket.parameters
    if bucket.name.startswith("stage "):
        tensors = [*tensors, *stages[int(bucket.name.split()[1])].module.buffers()]
    with torch.no_grad():
        for tensor in tensors:
            local = local_of(tensor)
            if not local.is_meta and local.numel():
                flat = local.detach().contiguous()
                dist.broadcast(flat, group_src=0, group=bucket.group)
                local.detach().copy_(flat)
