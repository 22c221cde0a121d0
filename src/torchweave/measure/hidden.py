"""IDEA: the hidden share of communication, from recorded intervals and never from a difference of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

from torchweave.intervals import Intervals, difference, intersection, length, union
from torchweave.measure.lane_cpu import LinkLog
from torchweave.measure.link_kernel import NAME as LINK_KERNEL
from torchweave.measure.stopwatch import sleep_on_device

_SLEEP_KERNEL = "spin_kernel"
_HEAD_START = 30_000_000


def hidden_share_from_log(log: LinkLog, segments: Sequence[tuple[int, int]] | None) -> float | None:
    """Return the hidden share on a CPU.

    Args:
        log: What the link saw while the pair ran.
        segments: Begin and end of everything that was computed meanwhile, ns; None counts as computed whatever time
            nobody spent waiting for a collective.

    Returns:
        Between 0 and 1; None where nothing was communicated.
    """
    communication = union([(transfer.begin_ns, transfer.end_ns) for transfer in log.transfers])
    waiting = union(list(log.waits))
    computation = difference(communication, waiting) if segments is None else union(list(segments))
    return _share(communication, computation)


class Profile(NamedTuple):
    """What a woven pair did, from recorded intervals.

    Attributes:
        hidden_share: Communication time in which computation ran too; None where nothing was communicated.
        idle_share: Time between first and last operation in which a device did nothing; None without a device.
    """

    hidden_share: float | None
    idle_share: float | None


def profile_of(call: Callable[[], Any], counts: Callable[[str], bool] | None = None) -> Profile:
    """Return what a GPU did: kernels of NCCL and of a simulated link against all other device work.

    Args:
        call: Runs one woven pair, or a step of them.
        counts: Says by its name whether a kernel of communication is of the kind that is asked about; None asks about
            all of them.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        sleep_on_device(_HEAD_START)
        call()
        torch.cuda.synchronize()
    communication: list[tuple[int, int]] = []
    computation: list[tuple[int, int]] = []
    beside: list[tuple[int, int]] = []
    for event in profile.events() or ():
        if event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        if _SLEEP_KERNEL in event.name:
            continue
        span = (round(event.time_range.start * 1e3), round(event.time_range.end * 1e3))  # us to ns
        if not is_communication(event.name):
            computation.append(span)
        else:
            (communication if counts is None or counts(event.name) else beside).append(span)
    busy = union(communication + computation + beside)
    whole = int(busy[-1, 1] - busy[0, 0]) if len(busy) else 0
    return Profile(_share(union(communication), union(computation)), 1 - length(busy) / whole if whole else None)


def is_communication(kernel: str) -> bool:
    """Return whether a kernel's name is one of communication."""
    return kernel.startswith("nccl") or is_simulated(kernel)


def is_simulated(kernel: str) -> bool:
    """Return whether a kernel's name is that of a simulated link."""
    return kernel.startswith(LINK_KERNEL)


def _share(communication: Intervals, computation: Intervals) -> float | None:
    total = length(communication)
    return length(intersection(communication, computation)) / total if total else None
