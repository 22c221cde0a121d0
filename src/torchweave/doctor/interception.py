"""Tries `weave`'s interception on this torch: one rank, over gloo, with a collective in each strand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torchweave.engine.collectives import COLLECTIVES, Interception
from torchweave.engine.pair import engine, weave


def missing() -> str:
    """Return what does not work, as a sentence; empty where all does."""
    if not dist.is_available():
        return "This torch was built without torch.distributed."
    absent = [name for name in ("allreduce", "barrier", "broadcast") if name not in vars(dist.ProcessGroup)]
    if absent or not hasattr(Interception, "install"):
        return f"ProcessGroup has no {', '.join(absent)} that could be replaced (of {len(COLLECTIVES)} looked for)."
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        return _woven()
    finally:
        engine().close()
        dist.destroy_process_group()


def _woven() -> str:
    numbers = torch.arange(4.0, requires_grad=True)

    def forward() -> torch.Tensor:
        result = torch.ones(4)
        dist.all_reduce(result)
        return result * 2

    def backward() -> None:
        total = (numbers * numbers).sum()
        dist.all_reduce(total.detach().clone())
        total.backward()

    for _ in range(2):
        numbers.grad = None
        result = weave(forward, backward, strategy="turns")
        good = numbers.grad is not None and torch.equal(numbers.grad, 2 * numbers.detach())
        if not good or not torch.equal(result, torch.full((4,), 2.0)):
            return "A woven pair gave another result than a serial one."
    return ""
