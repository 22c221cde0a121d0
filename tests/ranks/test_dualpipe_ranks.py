"""DeepSeek's DualPipe, its own code from PyPI, and DualPipeV on one rank: woven, bit-equal, overlapping."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from adapter_cases import DIM, Block, Grid, overlapped_ns
from harness import check_equal, copied
from one_rank_v import OneRankV
from torch import nn

from torchweave.adapters.deepseek import overlapped
from torchweave.engine.pair import engine

ROWS, NUM_STEPS = 4, 3

needs_dualpipe = pytest.mark.skipif(
    importlib.util.find_spec("dualpipe") is None, reason="needs DeepSeek's package: pip install --no-deps dualpipe"
)


def criterion(output, target):
    return (output - target).square().mean().clone()


def on_cpu(patch):
    """Let version 1.0.0 of the package run without CUDA: it asks for the current device, and allocates on it."""
    from dualpipe import comm

    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(comm, "build_from_tensor_shapes", lambda: [torch.empty(ROWS, DIM, requires_grad=True)])


class _StoredWeightGrad(torch.autograd.Function):
    """x @ w.T, whose weight gradient waits in DualPipe's store while that is on: how zero-bubble is written there."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        from dualpipe import WeightGradStore

        x, weight = ctx.saved_tensors

        def add():
            weight.grad = grad.T @ x if weight.grad is None else weight.grad + grad.T @ x

        if WeightGradStore.enabled:
            WeightGradStore.put(add)
        else:
            add()
        return grad @ weight, None


class Stage(nn.Module):
    """A block that exchanges tokens, and a layer whose weight gradient may come later."""

    def __init__(self, exchange):
        super().__init__()
        self.block, self.last = Block(exchange), nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)

    def forward(self, x):
        return _StoredWeightGrad.apply(self.block(x), self.last)


def run_dualpipe(strategy):
    """Two ranks of a pipeline in both directions, two that exchange tokens; return every step's results and overlap."""
    from dualpipe import DualPipe, set_p2p_tensor_dtype, set_p2p_tensor_shapes

    grid = Grid(2)
    stage = type("Stage", (Stage,), {})
    if strategy is not None:
        overlapped(strategy=strategy)(stage)
    num_chunks, size = 8, (4 * ROWS, DIM)
    results, overlaps = [], []
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        set_p2p_tensor_shapes([(ROWS, DIM)])
        set_p2p_tensor_dtype(torch.float32)
        torch.manual_seed(5 + dist.get_rank())
        pipe = DualPipe((stage(grid.exchange), stage(grid.exchange)), process_group=grid.pp_group)
        for number in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
            x, target = (torch.randn(size, generator=generator) for _ in range(2))
            with engine().observe() as log:
                told = pipe.step(x, num_chunks=num_chunks, criterion=criterion, labels=[target], return_outputs=True)
            results.append(copied([*told, [parameter.grad for parameter in pipe.parameters()]]))
            overlaps.append(overlapped_ns(log.spans))
            pipe.zero_grad()
    return results, overlaps


@needs_dualpipe
def test_dualpipe_weaves_its_pairs(pool4):
    """Catches a hook that its runner does not find, or whose results it does not get where it looks for them."""
    alone = pool4.run(run_dualpipe, None)
    for (expected, nothing), (results, overlaps) in zip(alone, pool4.run(run_dualpipe, "turns"), strict=True):
        check_equal(expected, results)
        assert nothing == [0] * NUM_STEPS
        assert all(grad.abs().sum() > 0 for grad in expected[0][-1])
        assert overlaps[-1] > 0, overlaps


def run_v(strategy):
    grid = Grid(1)
    chunk = type("Chunk", (Block,), {})
    if strategy is not None:
        overlapped(strategy=strategy)(chunk)
    torch.manual_seed(5 + dist.get_rank())
    modules = [chunk(grid.exchange), chunk(grid.exchange)]
    pipe = OneRankV(modules)
    results, overlaps = [], []
    for number in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x, target = (torch.randn(5 * ROWS, DIM, generator=generator) for _ in range(2))
        with engine().observe() as log:
            told = pipe.step(x, num_chunks=5, criterion=criterion, labels=target)
        results.append(copied([*told, [p.grad for module in modules for p in module.parameters()]]))
        overlaps.append(overlapped_ns(log.spans))
        for module in modules:
            module.zero_grad()
    return results, overlaps


@pytest.mark.parametrize("strategy", ["turns", "auto"])
def test_dualpipev_on_one_rank_weaves_its_pairs(pool, strategy):
    """Catches the later spelling of the hook not being found, and outputs that are no list."""
    alone = pool.run(run_v, None)
    for (expected, nothing), (results, overlaps) in zip(alone, pool.run(run_v, strategy), strict=True):
        check_equal(expected, results)
        assert nothing == [0] * NUM_STEPS
        assert overlaps[-1] > 0 or strategy == "auto", overlaps
