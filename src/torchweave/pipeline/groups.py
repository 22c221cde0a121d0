"""IDEA: a pipeline communicates on groups of its own: nothing of the user's mixes with it, or breaks with it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store

from torchweave.errors import UsageError, WaitLimitError

# What a GPU's group allows beyond the pipeline's own limit: NCCL's watchdog counts from where an operation was queued
# and ends the process, a rank's own wait begins when it has queued a whole step and ends in an error that says who.
_MORE_THAN_LIMIT_S = 10.0


def own_group(
    parent: dist.ProcessGroup, partition: Sequence[Sequence[int]], limit_s: float
) -> dist.ProcessGroup | None:
    """Make new groups of a group's ranks, and return the one that this rank is in; None where it is alone in it.

    Every rank of `parent` calls this.

    Args:
        parent: The group that is divided.
        partition: For each new group its ranks, numbered within `parent`; each rank in one of them.
        limit_s: How long a rank waits for another, seconds.

    Raises:
        WaitLimitError: The others do not call it.

    Source: torch/distributed/distributed_c10d.py: `new_group` needs every rank of the default group, unless with
        `use_local_synchronization`, which cannot split the communicator of a default group that is bound to a device;
        without being told it takes the default group's backend, not the parent's.
    """
    if parent.size() == 1:
        return None
    over_nccl = _is_over_nccl(parent)
    timeout = datetime.timedelta(seconds=group_limit_s(limit_s, over_nccl=over_nccl))
    here = parent.rank()
    mine = next(ranks for ranks in partition if here in ranks)
    if over_nccl and dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        split = dist.split_group(parent_pg=parent, split_ranks=[list(ranks) for ranks in partition], timeout=timeout)
        return split if len(mine) > 1 else None
    if len(mine) == 1:
        return None
    ranks = [dist.get_global_rank(parent, rank) for rank in mine]
    try:
        made = dist.new_group(ranks, timeout=timeout, backend=dist.get_backend(parent), use_local_synchronization=True)
    except dist.DistStoreError as error:
        raise WaitLimitError(
            f"rank {dist.get_rank()}",
            f"ranks {', '.join(map(str, ranks))} to build their pipeline",
            timeout.total_seconds(),
            remedy="call build on every rank of the group, with arguments of the same kind",
        ) from error
    assert isinstance(made, dist.ProcessGroup)
    return made


def group_limit_s(limit_s: float, *, over_nccl: bool) -> float:
    """Return the timeout of a pipeline's own group, seconds: over NCCL a last resort, behind the pipeline's own limit.

    Args:
        limit_s: How long a rank waits for another, seconds.
        over_nccl: Whether the group communicates over NCCL.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `WorkNCCL::checkTimeout`.
    """
    return 2 * limit_s + _MORE_THAN_LIMIT_S if over_nccl else limit_s


def own_store(own: dist.ProcessGroup) -> Store:
    """Return a store that the ranks of a pipeline's own group share, and no other pipeline.

    Source: torch/distributed/distributed_c10d.py, `split_group`: a group's name is made of its ranks within the group
        that was split, so that pipelines side by side get groups of one name.
    """
    ranks = "-".join(map(str, dist.get_process_group_ranks(own)))
    default = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"torchweave/pipeline/{own.group_name}/{ranks}", default)


def _is_over_nccl(group: dist.ProcessGroup) -> bool:
    """Return whether a group sends a GPU's tensors over NCCL, alone or beside another backend for the CPU's."""
    try:
        return bool(group._get_backend(torch.device("cuda")).name() == "nccl")
    except RuntimeError:  # it has none for GPUs
        return False


def device_of(chunks: Sequence[nn.Module], group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which stages compute, and whose tensors cross between them.

    Args:
        chunks: The stages' modules.
        group: The pipeline's group; where no module has weights, NCCL says that it is this process's GPU.

    Raises:
        UsageError: The group cannot send tensors of that device.
    """
    backend = dist.get_backend(group) if group is not None else ""
    found = [tensor.device for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    if not found:
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    if any(device.type == "meta" for device in found):
        raise UsageError(
            "A stage's weights are in memory when the pipeline is built",
            given="a stage on the device meta",
            remedy="give it memory with to_empty(device=...) and values, and then build",
        )
    if backend == ("gloo" if found[0].type == "cuda" else "nccl"):
        raise UsageError(
            "A pipeline's group sends tensors of the stages' device: NCCL a GPU's, gloo the CPU's",
            given=f"stages on {found[0]}, a group over {backend}",
            remedy="move the stages, or initialize the process group with the other backend",
        )
    return found[0]
