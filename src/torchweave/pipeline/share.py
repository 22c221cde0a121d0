"""IDEA: which weights several ranks hold: DualPipe's replicas, and weights that the user ties by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchweave.errors import UsageError, described
from torchweave.pipeline.agree import tell_all
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
        UsageError: What is tied is no weight of a stage here, or is not tied or looks otherwise on another rank; or two
            replicas are not alike.
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
    seen = {name: (_look(parameter), len(_stages_with(stages, parameter))) for name, parameter in tied.items()}
    ties, looks = zip(*tell_all(own, guard, (seen, _looks(stages))), strict=True)
    if len(placement) > 1:
        _check_replicas(looks, placement)
    buckets = _tied(stages, own, tied, ties, limit_s)
    equal: list[tuple[dist.ProcessGroup, Sequence[torch.Tensor]]] = [(b.group, b.parameters) for b in buckets]
    mirror = _mirror(placement, own, limit_s)
    if mirror is not None:
        buckets += _mirrored(stages, mirror, tied.values())
        # frozen weights and buffers, too
        modules = [stages[index].module for index in sorted(stages)]
        equal.append((mirror, [t for module in modules for t in (*module.parameters(), *module.buffers())]))
    for group, tensors in equal:
        guard.watch(group)
        with guard.on_break():
            _make_equal(group, tensors)
    return buckets


def _tied(
    stages: Mapping[int, Stage],
    own: dist.ProcessGroup,
    tied: Mapping[str, nn.Parameter],
    every: Sequence[Mapping[str, tuple[str, int]]],
    limit_s: float,
) -> list[Bucket]:
    """Return the buckets of the weights that the user ties.

    `every` says for each rank how they look, and in how many stages they are.
    """
    buckets = []
    for name in sorted({name for theirs in every for name in theirs}):
        holders = [rank for rank, theirs in enumerate(every) if name in theirs]
        if sum(every[rank][name][1] for rank in holders) == 1:
            raise UsageError(
                "A tied weight is named on each rank that has it",
                given=f"{name!r} on rank {holders[0]} alone, where one stage has it",
                remedy="pass tied= on the other rank too, with the same name",
            )
        if len({every[rank][name][0] for rank in holders}) > 1:
            raise UsageError(
                "A tied weight looks the same on every rank",
                given=", ".join(f"{every[rank][name][0]} on rank {rank}" for rank in holders),
                remedy=f"tie only equal weights as {name!r}",
            )
        others = [[rank] for rank in range(own.size()) if rank not in holders]
        group = own_group(own, [holders, *others], limit_s)
        if group is not None and name in tied:
            buckets.append(Bucket(f"tied {name}", [tied[name]], group, _stages_with(stages, tied[name])))
    return buckets


def _mirror(placement: Placement, own: dist.ProcessGroup, limit_s: float) -> dist.ProcessGroup | None:
    """Return the group of the two ranks of a bidirectional plan that hold the same stages."""
    if len(placement) == 1:
        return None
    pairs = sorted({tuple(sorted({ranks[stage] for ranks in placement})) for stage in range(len(placement[0]))})
    return own_group(own, pairs, limit_s)


def _mirrored(stages: Mapping[int, Stage], group: dist.ProcessGroup, tied: Iterable[nn.Parameter]) -> Iterator[Bucket]:
    """Yield the buckets of a bidirectional plan: of each stage what is not tied, and in no bucket yet."""
    taken = {id(parameter) for parameter in tied}
    # from the last: a weight that two stages share is complete with the later one of them
    for index in sorted(stages):
        parameters = [p for p in stages[index].module.parameters() if p.requires_grad and id(p) not in taken]
        taken.update(id(parameter) for parameter in parameters)
        needed = frozenset(stage for parameter in parameters for stage in _stages_with(stages, parameter))
        if parameters:
            yield Bucket(f"stage {index}", parameters, group, needed)


def _look(tensor: torch.Tensor) -> str:
    grad = " with gradient" if tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{grad}"


def _looks(stages: Mapping[int, Stage]) -> dict[int, dict[str, str]]:
    """Return for each stage how its weights and buffers look, by their names."""
    return {
        index: {
            name: _look(tensor) for name, tensor in (*stage.module.named_parameters(), *stage.module.named_buffers())
        }
        for index, stage in stages.items()
    }


def _check_replicas(every: Sequence[Mapping[int, Mapping[str, str]]], placement: Placement) -> None:
    """Raise where the two replicas of a stage are not alike: their weights are summed by their order."""
    for stage, (rank, other) in enumerate(zip(*placement, strict=True)):
        mine, theirs = every[rank][stage], every[other][stage]
        for name in (*mine, *theirs):
            if mine.get(name) != theirs.get(name):
                raise UsageError(
                    "The two replicas of a stage have the same weights and buffers",
                    given=f"stage {stage} has {name} {mine.get(name, 'not')} on rank {rank}, "
                    f"{theirs.get(name, 'not')} on rank {other}",
                    remedy="build both alike, and freeze the same weights",
                )


def _stages_with(stages: Mapping[int, Stage], parameter: object) -> frozenset[int]:
    return frozenset(
        index for index, stage in stages.items() if any(each is parameter for each in stage.module.parameters())
    )


def _make_equal(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank of a group the lowest one's values."""
    with torch.no_grad():
        for tensor in tensors:
            local = local_of(tensor)
            if local.numel():
                flat = local.detach().contiguous()
                dist.broadcast(flat, group_src=0, group=group)
                local.detach().copy_(flat)
