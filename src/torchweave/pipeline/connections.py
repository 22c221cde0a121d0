"""IDEA: what NCCL and gloo do each in its own way: breaking connections, and telling what a GPU has done."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_BREAK_TAG = 2**30


def mark(device: torch.device) -> Callable[[], bool]:
    """Queue a mark behind what a device's current stream has been given; return what says whether it is reached."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    query: Callable[[], bool] = event.query
    return query


def close_connections(group: dist.ProcessGroup, *, on_gpu: bool) -> None:
    """Close a group's connections.

    Source: gloo/transport/tcp/unbound_buffer.cc: a wait whose time is over fails every pair of its context.
    """
    if on_gpu:
        with contextlib.suppress(RuntimeError):
            group._get_backend(torch.device("cuda")).abort()
        return
    for peer in range(group.size()):
        if peer != group.rank():
            # a pair that is closed already fails at once, and wakes nobody; the first open one closes all
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), group_src=peer, group=group, tag=_BREAK_TAG)
                if work is not None:
                    work.wait(datetime.timedelta(milliseconds=1))
