"""IDEA: the hidden share of communication, from recorded intervals and never from a difference of times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

from torchweave.intervals import Intervals, difference, intersection, length, union
from torchweave.measure.lane_cpu import LinkLog
from torchweave.measure.link_kernel import NAME as LINK_KERNEL
from torchweave.measure.stopwatch import sleep_on_device

_SLEEP_KERNEL = "spin_kernel"
_HEAD_START = 30_000_000
# recording operators slows the host down
_LONG_HEAD_START = 80_000_000


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


class Operation(NamedTuple):
    """What a device did.

    Attributes:
        name: The kernel's name, or that of a copy.
        begin_ns: When it began.
        end_ns: When it ended.
    """

    name: str
    begin_ns: int
    end_ns: int


def profile_of(
    call: Callable[[], Any],
    meet: Callable[[], Any] = lambda: None,
    counts: Callable[[str], bool] = lambda _: True,
) -> Profile:
    """Return what a GPU did: kernels of NCCL and of a simulated link against all other device work.

    Args:
        call: Runs one woven pair, or a step of them.
        meet: Lets the ranks that run the pair together begin together; what it queues does not count.
        counts: Says by its name whether a kernel of communication is of the kind that is asked about.
    """
    return shares(operations_of(recorded(call, meet)), counts)


def recorded(
    call: Callable[[], Any], meet: Callable[[], Any] = lambda: None, *, operators: bool = False
) -> torch.profiler.profile:
    """Record a call whose host is a few ms ahead, as in training.

    Args:
        call: What is recorded.
        meet: Lets the ranks that run it together begin together; what it queues does not count.
        operators: Whether to record the operators of all threads too, for a trace that says more.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    config = None
    if operators:
        activities.append(torch.profiler.ProfilerActivity.CPU)
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    head_start = _LONG_HEAD_START if operators else _HEAD_START
    profile: torch.profiler.profile
    with torch.profiler.profile(activities=activities, experimental_config=config, acc_events=True) as profile:
        meet()
        if torch.cuda.is_initialized():
            sleep_on_device(head_start)
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return profile


def operations_of(profile: torch.profiler.profile) -> list[Operation]:
    """Return what the device did in a recorded call, from the end of what gave the host its head start."""
    return after_head_start(
        # us to ns
        Operation(event.name, round(event.time_range.start * 1e3), round(event.time_range.end * 1e3))
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )


def after_head_start(operations: Iterable[Operation]) -> list[Operation]:
    """Return what began when the head start was over: a collective by which ranks meet before it waits for them."""
    found = list(operations)
    begin_ns = max((one.end_ns for one in found if _SLEEP_KERNEL in one.name), default=0)
    return [one for one in found if one.begin_ns >= begin_ns]


def shares(operations: Iterable[Operation], counts: Callable[[str], bool] = lambda _: True) -> Profile:
    """Return how much of the communication that counts was hidden, and how long the device was idle."""
    communication: list[tuple[int, int]] = []
    computation: list[tuple[int, int]] = []
    beside: list[tuple[int, int]] = []
    for name, begin_ns, end_ns in operations:
        if not is_communication(name):
            computation.append((begin_ns, end_ns))
        else:
            (communication if counts(name) else beside).append((begin_ns, end_ns))
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
