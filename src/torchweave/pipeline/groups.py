"""IDEA: a pipeline communicates on groups of its own: nothing of the user's mixes with it, or breaks with it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist


def own_group(
    parent: dist.ProcessGroup, partition: Sequence[Sequence[int]], limit_s: float
) -> dist.ProcessGroup | None:
    """Make new groups of a group's ranks, and return the one that this rank is in; None where it is alone in it.

    Every rank of `parent` calls this.

    Args:
        parent: The group that is divided.
        partition: For each new group its ranks, numbered within `parent`; each rank in one of them.
        limit_s: The timeout of the new groups, seconds.

    Source: torch/distributed/distributed_c10d.py: `new_group` needs every rank of the default group, unless with
        `use_local_synchronization`, which cannot split the communicator of a default group that is bound to a device.
    """
    timeout = datetime.timedelta(seconds=limit_s)
    here = parent.rank()
    mine = next(ranks for ranks in partition if here in ranks)
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        split = dist.split_group(parent_pg=parent, split_ranks=[list(ranks) for ranks in partition], timeout=timeout)
        return split if len(mine) > 1 else None
    if len(mine) == 1:
        return None
    ranks = [dist.get_global_rank(parent, rank) for rank in mine]
    made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors a group can send: the GPU of this process, or the CPU."""
    names = {device.type for device in group._device_types}
    if "cuda" in names and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
