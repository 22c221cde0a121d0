"""IDEA: a slow link of real hardware: a group whose communicator has few channels, whoever runs the pair."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def limited_group(channels: int | None, limit: timedelta) -> dist.ProcessGroup:
    """Make a group over all ranks of the job, whose communicator is its own. Every rank calls this.

    Args:
        channels: At most so many blocks, each on an SM of its own, carry a collective over NCCL; None leaves that to
            NCCL. Other backends have none.
        limit: The group's timeout.

    Source: NCCL's user guide, ncclConfig_t: maxCTAs is a communicator's own; torch hands `pg_options.config` to
        ncclCommSplit and ncclCommInitRankConfig (ProcessGroupNCCL.cpp).
    """
    if dist.get_backend() != dist.Backend.NCCL:
        made = dist.new_group(timeout=limit)
    else:
        options = dist.ProcessGroupNCCL.Options()
        # torch warns where this is not the timeout that it is given
        options._timeout = limit
        if channels is not None:
            options.config.max_ctas = channels
        made = dist.new_group(timeout=limit, backend="nccl", pg_options=options)
    assert isinstance(made, dist.ProcessGroup)
    return made
