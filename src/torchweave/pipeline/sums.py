"""IDEA: weights that several ranks hold get the sum of their gradients, begun when a rank's part is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchweave.errors import UsageError
from torchweave.pipeline.faults import Guard

Parameters = Sequence[nn.Parameter]


@dataclass(slots=True)
class Bucket:
    """Weights that the same ranks hold, in the same order on each of them.

    Attributes:
        name: The same on every rank that has it, and none else's.
        parameters: The weights.
        group: The ranks that hold them; of this pipeline alone.
        stages: The stages of this rank that give them gradients.
    """

    name: str
    parameters: Parameters
    group: dist.ProcessGroup
    stages: frozenset[int]
    _before: list[Tensor | None] = field(default_factory=list)
    _flat: list[Tensor] = field(default_factory=list)
    _works: list[dist.Work] = field(default_factory=list)

    def set_aside(self) -> None:
        """Take away what earlier steps have accumulated: that has been summed already."""
        self._before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def start(self) -> None:
        """Start to sum what this step has accumulated, and which of the weights have a gradient at all.

        Raises:
            UsageError: A gradient is sparse.
        """
        sparse = sum(p.grad is not None and p.grad.layout is not torch.strided for p in self.parameters)
        if sparse:
            raise UsageError(
                "Weights that several ranks hold have dense gradients",
                given=f"{self.name} with {sparse} sparse ones",
                remedy="make the embedding without sparse=True",
            )
        for dtype in dict.fromkeys(local_of(p).dtype for p in self.parameters):
            grads = [_gradient(p).flatten() for p in self.parameters if local_of(p).dtype == dtype]
            self._flat.append(torch.cat(grads))
        self._flat.append(_on_device([p.grad is not None for p in self.parameters], self.parameters[0]))
        for flat in self._flat:
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            assert work is not None
            self._works.append(work)

    def finish(self, guard: Guard) -> None:
        """Wait for the sums, and add them to what was set aside."""
        for work in self._works:
            guard.wait(work, None, on_host=True)
        *flats, has_grad = self._flat
        some = has_grad.tolist()
        for dtype, flat in zip(dict.fromkeys(local_of(p).dtype for p in self.parameters), flats, strict=True):
            mine = [index for index, p in enumerate(self.parameters) if local_of(p).dtype == dtype]
            parts = flat.split([local_of(self.parameters[index]).numel() for index in mine])
            for index, part in zip(mine, parts, strict=True):
                if some[index]:
                    _set(self.parameters[index], part)
        self._restore()

    def abandon(self) -> None:
        """Give back what was set aside, after a failure."""
        if self._before:
            self._restore()

    def _restore(self) -> None:
        for parameter, before in zip(self.parameters, self._before, strict=True):
            if before is not None:
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before
        self._before, self._flat, self._works = [], [], []


class Sums:
    """All buckets of a rank.

    They are started in one order, the same on every rank, and each only when the ones before it have been: two ranks
    that share two buckets need not complete them in the same order.

    Args:
        buckets: In that order.
        has_all: Whether every weight that gets a gradient has to be in one of them: two replicas are trained.
    """

    def __init__(self, buckets: Sequence[Bucket], *, has_all: bool) -> None:
        self._buckets, self._has_all = buckets, has_all
        self._complete: set[int] = set()
        self._num_started = 0

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Begin a step.

        Args:
            modules: The stages; empty where their weights change places by themselves (FSDP2).

        Raises:
            UsageError: A weight that would have to be summed was made, replaced or unfrozen since.
        """
        self._complete, self._num_started = set(), 0
        self._check(modules)
        for bucket in self._buckets:
            bucket.set_aside()

    def _check(self, modules: Sequence[nn.Module]) -> None:
        if not modules or not (self._buckets or self._has_all):
            return
        held = {id(p): p.requires_grad for module in modules for p in module.parameters()}
        known = {id(p) for bucket in self._buckets for p in bucket.parameters}
        gone = len(known - set(held))
        new = sum(requires_grad and each not in known for each, requires_grad in held.items()) if self._has_all else 0
        if gone or new:
            raise UsageError(
                "Weights that several ranks hold are those that the stages had when the pipeline was built",
                given=f"{gone} that are in no stage any more, {new} that are new or did not require gradients then",
                remedy="build the pipeline after weights were replaced or unfrozen",
            )

    def complete(self, stage: int) -> None:
        """Note that a stage has all its gradients of this step, and start what can be."""
        self._complete.add(stage)
        while self._num_started < len(self._buckets):
            bucket = self._buckets[self._num_started]
            if not bucket.stages <= self._complete:
                break
            bucket.start()
            self._num_started += 1

    def finish(self, guard: Guard) -> None:
        """Wait for all of them."""
        for bucket in self._buckets:
            bucket.finish(guard)

    def abandon(self) -> None:
        """Give back what was set aside, after a failure."""
        for bucket in self._buckets:
            bucket.abandon()


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank: a DTensor's shard, or the tensor itself."""
    local: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return local


def _on_device(flags: Sequence[bool], parameter: nn.Parameter) -> Tensor:
    """Return flags where a parameter is, without a wait for the device: in the middle of a step the host runs ahead."""
    device = local_of(parameter).device
    return torch.tensor(flags, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(local_of(parameter)) if parameter.grad is None else local_of(parameter.grad)


def _set(parameter: nn.Parameter, part: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    local_of(parameter.grad).copy_(part.view_as(local_of(parameter)))
