"""IDEA: what a crossing costs the host, beyond the collective's own call: many of them, around next to no work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from torchweave.measure.pair_times import Pair, no_collection, serially

NUM_CROSSINGS = 50
_ELEMENTS = 4
_ROUNDS, _WARMUP = 20, 5


def host_cost_us(
    weaves: Mapping[str, Callable[..., Any]], group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Return what a crossing costs the host by each way to weave, us: the median of interleaved rounds.

    The pair is one of tiny all-reduces alone. Its serial run is taken off, so what is left is the engine's: to find
    the crossing, to hand the turn over, and what the other strand's wake-up takes.

    Args:
        weaves: What runs both at once, by a name of your own.
        group: A group of this rank alone, so that no other rank's pace is measured.
        device: Where the tensors are.
    """
    samples: dict[str, list[float]] = {name: [] for name in ("serial", *weaves)}
    with no_collection():
        for index in range(_WARMUP + _ROUNDS):
            for name, weave in {"serial": serially, **weaves}.items():
                forward, backward = _pair(group, device)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                begun = time.perf_counter_ns()
                kept = weave(forward=forward, backward=backward)
                took_us = (time.perf_counter_ns() - begun) / 1e3
                del kept
                if index >= _WARMUP:
                    samples[name].append(took_us)
    serial = statistics.median(samples["serial"])
    return {name: (statistics.median(samples[name]) - serial) / (2 * NUM_CROSSINGS) for name in weaves}


def _pair(group: dist.ProcessGroup, device: torch.device) -> Pair:
    weight = torch.ones(_ELEMENTS, device=device, requires_grad=True)
    loss = _crossings(weight, group)
    return (lambda: _crossings(weight, group)), (lambda: loss.backward())


def _crossings(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    for _ in range(NUM_CROSSINGS):
        x = _reduced(x, group)
    return x.sum()


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, op=dist.ReduceOp.MAX, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        y = grads[0].clone()
        dist.all_reduce(y, op=dist.ReduceOp.MAX, group=ctx.group)
        return y, None


_reduced: Callable[..., torch.Tensor] = _Reduced.apply  # not annotated in torch
