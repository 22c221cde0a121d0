"""Odd models, and ranks that were given different things: equal to one process, or an error that names it."""

import logging
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import DIM, check_equal
from pipelines import build, check_values, data, mse
from torch import nn

import torchweave as tw
from torchweave.errors import PipelineError, UsageError, WaitLimitError


class Ways(nn.Module):
    """Passes on tensors that lie in memory in other ways, one that is its own buffer, a conjugate and a NaN."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2)
        self.phase = nn.Parameter(torch.randn(DIM, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x, image=None, wave=None, seen=None, nothing=None):
        image = x.detach().reshape(1, -1, 1, DIM).expand(2, -1, 3, -1).contiguous() if image is None else image
        wave = x.to(torch.complex64) if wave is None else wave
        self.seen += 1
        y = torch.tanh(self.weight @ x.t()).t() + image.mean((0, 2)) + (wave * self.phase).real
        y = y if seen is None else y * seen / 3
        image = (image * 1.5).to(memory_format=torch.channels_last)
        return y, image, (wave * self.phase).conj(), self.seen, float("nan")


def ways(schedule):
    def make(num_stages, seed):
        return [Ways(seed + index) for index in range(num_stages)]

    def loss_fn(output, target):
        assert output[1].is_contiguous(memory_format=torch.channels_last)
        return mse(output[0], target) + output[2].abs().mean()

    check_values(schedule, make, loss_fn)


def every_way():
    for schedule in ("1f1b", "zbv", "dualpipev"):
        ways(schedule)


def test_tensors_keep_how_they_lie_in_memory_and_buffers_do_not_change_on_the_way(pool):
    pool.run(every_way)


def linear():
    return nn.Linear(DIM, DIM)


def different_arguments():
    rank = dist.get_rank()
    build_ = tw.pipeline.build
    chunk = linear()
    for match, call in (
        ("same schedule", lambda: build_([chunk] * (1 + rank), ("1f1b", "dualpipe")[rank])),
        ("same number of chunks", lambda: build_([chunk] * (1 + rank), "interleaved")),
        ("same dynamic_shapes", lambda: build_(chunk, "1f1b", dynamic_shapes=rank == 0)),
        ("on each rank that has it", lambda: build_(chunk, "1f1b", tied={"w": chunk.weight} if rank else {})),
        ("two replicas", lambda: build_([nn.Linear(DIM, DIM + rank), linear()], "dualpipe")),
        ("two replicas", lambda: build_([linear().requires_grad_(rank == 0), linear()], "dualpipe")),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            call()
        assert caught.value.remedy
        assert re.search(r"\brank [01]\b", caught.value.given), caught.value.given
    if rank == 0:  # and one who does not build at all
        with pytest.raises(WaitLimitError, match=r"rank 0 waited 0.5 s for ranks 0, 1 to build"):
            build_(chunk, "1f1b", limit_s=0.5)


def test_ranks_that_build_differently_are_told_so_at_once(pool):
    pool.run(different_arguments)


def different_steps():
    rank = dist.get_rank()
    for match, options in (
        ("same loss_scale", {"loss_scale": 1.0 + rank}),
        ("same reduction", {"reduction": ("mean", "sum")[rank]}),
    ):
        pipeline, _, _ = build("1f1b")
        with pytest.raises(PipelineError, match=match):
            pipeline.step(*data(4, 0), num_microbatches=4, loss_fn=mse, **options)


def test_ranks_that_step_differently_are_told_so(pool):
    pool.run(different_steps)


def wrong_values():
    build_ = tw.pipeline.build
    x, y = data(4, 0)
    pipeline, _, _ = build("1f1b")

    def step_of(pipeline, **options):
        pipeline.step(**{"inputs": x, "targets": y, "num_microbatches": 4, "loss_fn": mse, **options})

    def step(**options):
        step_of(pipeline, **options)

    for match, call in (
        ("model_chunks are modules", lambda: build_(None, "1f1b")),
        ("schedule is a name or a plan", lambda: build_(linear(), None)),
        ("limit_s is a time", lambda: build_(linear(), "1f1b", limit_s="long")),
        ("limit_s is a time", lambda: build_(linear(), "1f1b", limit_s=float("inf"))),
        ("tied is a dict", lambda: build_(linear(), "1f1b", tied=["w"])),
        ("in memory", lambda: build_(linear().to("meta"), "1f1b")),
        ("whole number of microbatches", lambda: step(num_microbatches=2.0)),
        ("whole number of microbatches", lambda: step(num_microbatches=True)),
        ("whole number of microbatches", lambda: step(num_microbatches="4")),
        ("finite number", lambda: step(loss_scale=float("nan"))),
        ("finite number", lambda: step(loss_scale="1")),
        ("computes gradients", lambda: torch.no_grad()(step)()),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            call()
        assert caught.value.remedy
    step()  # and nothing is broken
    for match, given in (
        ("What is cut in targets is a tensor", {"targets": np.zeros((4, DIM))}),
        ("one real element", {"loss_fn": lambda out, _: out.mean() * 1j}),
        ("Given: tuple with a tensor inside", {"loss_fn": lambda out, _: (out.mean(), 1)}),
    ):
        pipeline, _, _ = build("1f1b")
        with pytest.raises(PipelineError, match=match):
            step_of(pipeline, **given)


def test_wrong_values_are_named(pool):
    pool.run(wrong_values)


def a_step_inside_a_step():
    told = []

    class Nested(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            with pytest.raises(UsageError, match="one step at a time"):
                pipeline.step(x, x, num_microbatches=1, loss_fn=mse)
            told.append(x)
            return self.inner(x)

    pipeline, _, _ = build("1f1b", lambda count, seed: [Nested(seed) for _ in range(count)])
    pipeline.step(*data(4, 0), num_microbatches=4, loss_fn=mse)
    assert len(told) == 4


def test_a_step_inside_a_step_is_refused(pool):
    pool.run(a_step_inside_a_step)


def a_module_list():
    chunks = nn.ModuleList([linear(), linear()])
    assert len(tw.pipeline.build(chunks, "interleaved").stages) == 2


def test_a_module_list_is_its_modules(pool):
    pool.run(a_module_list)


def replicas_that_change():
    rank = dist.get_rank()

    def make(num_stages, seed):
        torch.manual_seed(rank)  # unequal, the frozen ones and the buffers too
        return [nn.Sequential(linear(), linear().requires_grad_(False), nn.BatchNorm1d(DIM)) for _ in range(num_stages)]

    def changed(change):
        pipeline, _, mine = build("dualpipe", make)
        pipeline.step(*data(4, 0), num_microbatches=4, loss_fn=mse)
        for chunk in mine.values():
            change(chunk)
        with pytest.raises(PipelineError, match="had when the pipeline was built"):
            pipeline.step(*data(4, 0), num_microbatches=4, loss_fn=mse)

    changed(lambda chunk: chunk.requires_grad_(True))
    changed(lambda chunk: setattr(chunk[0], "weight", nn.Parameter(torch.ones(DIM, DIM))))
    _, _, mine = build("dualpipe", make)
    return {index: [*chunk.parameters()] for index, chunk in mine.items()}


def test_replicas_are_equal_with_what_is_frozen_and_told_when_they_could_part(pool):
    one, other = pool.run(replicas_that_change)
    check_equal(one, other)


def sparse_replicas():
    def make(num_stages, seed):
        return [nn.Embedding(7, DIM, sparse=True), *(nn.Linear(DIM, DIM) for _ in range(num_stages - 1))]

    pipeline, _, _ = build("dualpipe", make)
    ids = torch.arange(4) % 7
    with pytest.raises(PipelineError, match="dense gradients"):
        pipeline.step(ids, None, num_microbatches=4, loss_fn=lambda out: out.mean())


def test_sparse_gradients_of_what_several_ranks_hold_are_refused(pool):
    pool.run(sparse_replicas)


def a_loss_without_a_graph():
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("torchweave").addHandler(handler)
    pipeline, _, _ = build("1f1b")
    for _ in range(2):
        pipeline.step(*data(4, 0), num_microbatches=4, loss_fn=lambda out, y: mse(out.detach(), y))
    logging.getLogger("torchweave").removeHandler(handler)
    return told


def test_a_loss_that_trains_nothing_is_said_once(pool):
    first, last = pool.run(a_loss_without_a_graph)
    assert not first
    assert [text for text in last if "requires no gradient" in text] == last
    assert len(last) == 1
