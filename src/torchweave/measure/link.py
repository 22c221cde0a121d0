"""IDEA: a link whose speed is chosen: every collective ends no sooner than its bytes over that speed allow.

It sits below torch.distributed and knows nothing of who communicates, so serial, woven, computation alone and
communication alone meet the same link. What it does not see: the Work of a block of coalesced NCCL operations, and a
future of a collective on a GPU, which completes only when its Work is waited for (DDP's reducer waits for futures).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torchweave.engine.later import tensors_of
from torchweave.errors import TorchweaveError, UsageError
from torchweave.measure.c10d import (
    POINT_TO_POINT,
    Call,
    Interception,
    num_bytes,
    raw_wait_callback,
    unboxed_work,
)
from torchweave.measure.lane_cpu import CpuLane, LinkLog
from torchweave.measure.lane_cuda import CudaLane
from torchweave.measure.link_kernel import LinkKernel

_Lane: TypeAlias = CpuLane | CudaLane


class Recording:
    """The collectives of one run, in order, with their tensors.

    Args:
        link: The link that recorded them, and carries them again.
    """

    def __init__(self, link: SimulatedLink) -> None:
        self._link = link
        self.calls: list[Call] = []

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def num_bytes(self) -> int:
        """How many bytes the recorded collectives move on this rank."""
        return sum(num_bytes(call.args) for call in self.calls)

    def replay(self) -> None:
        """Run the collectives again, one after another, each waited for: communication alone.

        Point-to-point operations that follow each other are started together, as a batch, because the peer's receive
        may come after its send.
        """
        batch: list[c10d.Work] = []
        for call in self.calls:
            if call.operation.name not in POINT_TO_POINT:
                _wait_for(batch)
            work = unboxed_work(call.operation.overload(*call.args, **call.kwargs))
            if work is not None:
                batch.append(work)
            if call.operation.name not in POINT_TO_POINT:
                _wait_for(batch)
        _wait_for(batch)


class SimulatedLink:
    """A link of a chosen speed under torch.distributed, for as long as its `with` block runs.

    All groups over the same ranks share one first-in-first-out link without directions. A collective ends at the
    later of its real end and `max(time of issue, link free) + bytes / speed`, where bytes is the larger of what it
    reads and writes on this rank. Groups of one rank are delayed too. Barriers move nothing and are not delayed.

    - On a CPU the wait sleeps, and `log` has the times of every collective.
    - On a GPU a kernel on the link's own stream of high priority lasts that long and holds `sms` SMs whole, while it
      moves the bytes in device memory (as many of them as so many SMs can move in that time); `wait` lets the current
      stream wait for its end and holds no host. Source: %globaltimer and launch limits are CUDA's, from the PTX ISA.

    Args:
        gbps: Speed in gigabits a second, as links are sold; None delays nothing, and `mute` and `record` still work.
        sms: How many SMs a collective holds on a GPU (1: a copy engine; 8 or 32: NCCL's channels).
        only_lone_groups: Whether only groups of one rank are behind the link, and all others go to their backend.

    Raises:
        UsageError: A speed or a number of SMs that is not above zero.
    """

    def __init__(self, gbps: float | None, *, sms: int = 1, only_lone_groups: bool = False) -> None:
        if gbps is not None and not 0 < gbps < float("inf"):
            raise UsageError("A link's speed is above 0 gigabits a second", given=f"{gbps}", remedy="such as 10")
        if sms < 1:
            raise UsageError("A link holds at least one SM", given=f"{sms}", remedy="1 for a copy engine")
        self.gbps, self.sms, self.log = gbps, sms, LinkLog()
        self._only_lone_groups = only_lone_groups
        self._lanes: dict[tuple[str, tuple[int, ...]], _Lane] = {}
        self._kernels: dict[int, LinkKernel] = {}
        self._lock = threading.Lock()
        self._muted = self._paused = False
        self._recording: Recording | None = None
        self._interception: Interception | None = None

    def __enter__(self) -> SimulatedLink:
        self._interception = Interception(self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._interception is not None:
            self._interception.close()
            self._interception = None
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.close()

    def __str__(self) -> str:
        """Say what the link is, as the table shows it."""
        if self.gbps is None:
            return f"none: {dist.get_backend().upper()}"
        held = f"{self.sms} SM" + "s" * (self.sms > 1)
        return f"simulated link, {self.gbps:g} Gb/s, {held}"

    def held_part(self, num_bytes: int, device: torch.device) -> float:
        """Return which part of a device's SMs this link holds while it carries so many bytes alone; 0 on a CPU."""
        kernel = self._kernels.get(device.index or 0)
        if kernel is None or self.gbps is None:
            return 0.0
        return kernel.part_held(num_bytes, round(num_bytes * 8 / self.gbps))

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Let every collective return at once, its outputs as they were allocated: computation alone.

        Integers are sent all the same, undelayed: they may say how much is computed.
        """
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let every collective go to its backend undelayed: for what is not measured."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Collect what is communicated meanwhile, from any thread, with its tensors.

        Raises:
            TorchweaveError: A recording is under way already.
        """
        if self._recording is not None:
            raise TorchweaveError("One recording at a time", remedy="leave the first one's `with` block before")
        recording = self._recording = Recording(self)
        try:
            yield recording
        finally:
            self._recording = None

    def _handle(self, call: Call) -> object:
        if self._muted and not _says_how_much(call):
            return call.operation.result(call.args, _ended())
        if self._recording is not None:
            self._recording.calls.append(call)
        if self._muted or self._paused or call.operation.name == "barrier" or num_bytes(call.args) == 0:
            return call.redispatch()
        group = call.operation.group_of(call.args)
        if self._only_lone_groups and group.size() > 1:
            return call.redispatch()
        device = next(tensors_of(call.args)).device
        if device.type not in ("cpu", "cuda") or (self.gbps is None and device.type == "cuda"):
            return call.redispatch()
        return self._lane(device, group).carry(call)

    def _lane(self, device: torch.device, group: dist.ProcessGroup) -> _Lane:
        key = (str(device), _ranks_of(group))
        lane = self._lanes.get(key)
        if lane is None:
            with self._lock:
                lane = self._lanes.get(key) or self._lanes.setdefault(key, self._new_lane(device, len(key[1]) == 1))
        return lane

    def _new_lane(self, device: torch.device, alone: bool) -> _Lane:
        ns_per_byte = 0.0 if self.gbps is None else 8 / self.gbps
        if device.type == "cpu":
            return CpuLane(ns_per_byte, self.log)
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._kernels:
            self._kernels[index] = LinkKernel(index, self.sms)
        return CudaLane(device, ns_per_byte, self._kernels[index], alone=alone)


def _says_how_much(call: Call) -> bool:
    tensors = list(tensors_of(call.args))
    return bool(tensors) and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return a group's global ranks: twins of a group share its link."""
    return tuple(dist.get_process_group_ranks(group))


def _ended() -> c10d.Work:
    """Return a Work that has ended, and its future too."""
    work = c10d.PythonCallbackWork(_nothing)
    raw_wait_callback(work)
    return work


def _nothing(_: timedelta) -> bool:
    return True


def _wait_for(works: list[c10d.Work]) -> None:
    for work in works:
        work.wait()
    works.clear()
