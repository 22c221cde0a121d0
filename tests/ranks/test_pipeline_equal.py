"""A pipeline's losses and gradients are those of one process that sums in the plan's order, to the bit."""

import random

import pytest
import torch
import torch.distributed as dist
from harness import DIM, Cross, check_equal
from pipelines import Block, blocks, build, check_schedule, check_values, data, mse, truth
from torch import nn

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.intervals import intersection, length, union
from torchweave.schedule.build import names
from torchweave.schedule.passes import only_compute, split_backward, take_pairs_apart

SCHEDULES = names()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_four_ranks(pool4, schedule):
    pool4.run(check_schedule, schedule, 8)


def every_schedule():
    for schedule in SCHEDULES:
        check_schedule(schedule, 4, num_steps=3, seed=3)
    check_schedule("interleaved", 6, num_chunks=3, seed=4)


def test_every_schedule_on_two_ranks(pool):
    pool.run(every_schedule)


def random_pipelines(seed, count):
    pick = random.Random(seed)
    for case in range(count):
        size = dist.get_world_size()
        schedule = pick.choice(SCHEDULES)
        num_microbatches = pick.randint(1, 9)
        if schedule.startswith("dualpipe"):
            num_microbatches = 2 * size + 2 * pick.randint(0, 3)
        if schedule.startswith("interleaved"):
            num_microbatches = size * pick.randint(1, 3)
        options = {"rows": pick.randint(1, 4), "seed": seed + case, "dynamic_shapes": pick.random() < 0.3}
        num_chunks = pick.randint(1, 3) if schedule.startswith("interleaved") else None
        try:
            check_schedule(schedule, num_microbatches, num_chunks, num_steps=pick.randint(1, 3), **options)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {case}: {schedule}, {num_microbatches}, {options}") from error


def test_random_pipelines(pool):
    pool.run(random_pipelines, 1, 6)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10, 16))
def test_many_random_pipelines(pool4, seed):
    pool4.run(random_pipelines, 100 * seed, 40, timeout=600)


def own_plan():
    pipeline, _, _ = build("dualpipev")
    plan = only_compute(pipeline.plan(8))
    for changed in (take_pairs_apart(plan), split_backward(take_pairs_apart(plan))):
        check_schedule(changed, 8)


def test_a_plan_of_the_users_own(pool4):
    pool4.run(own_plan)


class Varied(nn.Module):
    """Passes on several tensors: with and without gradient, of several dtypes, an empty one, None and a number."""

    def __init__(self, seed):
        super().__init__()
        self.block = Block(seed)

    def forward(self, x, extra=None, *, last=False):
        if extra is None:
            extra = {"ids": torch.arange(x.shape[0]), "mask": x > 0, "plain": x.detach() * 2, "nothing": None}
            extra |= {"empty": x.new_empty(0, 3), "factor": 3, "side": x * 0.5, "unused": x + 1, "big": x.double()}
        x = self.block(x * extra["factor"] / 3) + extra["side"] * extra["mask"] + extra["plain"]
        x = x + extra["ids"][:, None]
        side = torch.tanh(x) if extra["side"].requires_grad else extra["side"]
        extra = {**extra, "side": side, "big": extra["big"] * 2.0}
        return x, extra


class Last(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, *args):
        x, extra = self.stage(*args)
        return x + extra["big"].float()


def varied(num_stages, seed):
    stages = [Varied(seed + index) for index in range(num_stages)]
    stages[-1] = Last(stages[-1])
    return stages


def many_values():
    for schedule in ("1f1b", "zbv", "dualpipe"):
        check_values(schedule, varied)


def test_what_crosses_may_be_several_tensors_of_many_kinds(pool):
    pool.run(many_values)


class Frozen(nn.Module):
    """A stage without weights that need gradients, in front of which nothing needs any."""

    def __init__(self, seed):
        super().__init__()
        self.block = Block(seed).requires_grad_(False)

    def forward(self, x):
        return self.block(x)


def frozen():
    def make(num_stages, seed):
        return [Frozen(seed) if index < 2 else Block(seed + index) for index in range(num_stages)]

    for schedule in ("dualpipev", "zbv"):
        pipeline, _, mine = build(schedule, make)
        x, y = data(4, 0)
        pipeline.step(x, y, num_microbatches=4, loss_fn=mse)
        for index, chunk in mine.items():
            assert all((p.grad is not None) == (index >= 2) for p in chunk.parameters()), index


def test_stages_without_gradients(pool):
    pool.run(frozen)


def batches_in_every_form():
    rank, size = dist.get_rank(), dist.get_world_size()
    pipeline, whole, mine = build("1f1b")
    x, y = data(4, 0)
    first, last = rank == 0, rank == size - 1
    expected, _ = truth(whole, pipeline.plan(4), x, y)
    for inputs, targets in (
        (x, y),
        (x if first else None, y if last else None),
        ((x,), y),
        ({"x": x}, y),
        (list(x.chunk(4)) if first else [None] * 4, list(y.chunk(4))),
    ):
        loss, outputs = pipeline.step(inputs, targets, num_microbatches=4, loss_fn=mse)
        check_equal(expected, loss, "loss")
        assert (outputs is not None) == last
        if last:
            assert torch.cat(outputs).shape == x.shape
            assert not outputs[0].requires_grad
    # uneven microbatches, as a list
    ragged = [torch.ones(rows, DIM) for rows in (1, 3, 2)]
    loss, _ = pipeline.step(ragged, None, num_microbatches=3, loss_fn=lambda out: out.sum(), keep_outputs=False)
    # the gradients of two accumulating steps, each scaled by a half, are those of one
    for chunk in mine.values():
        chunk.zero_grad()
    for _ in range(2):
        pipeline.step(x, y, num_microbatches=4, loss_fn=mse, loss_scale=0.5)
    halves = [p.grad.clone() for chunk in mine.values() for p in chunk.parameters()]
    for chunk in mine.values():
        chunk.zero_grad()
    pipeline.step(x, y, num_microbatches=4, loss_fn=mse)
    for half, one in zip(halves, (p.grad for chunk in mine.values() for p in chunk.parameters()), strict=True):
        torch.testing.assert_close(half, one, rtol=1e-5, atol=1e-7)  # powers of two scale exactly; sums round
    summed, _ = pipeline.step(x, y, num_microbatches=4, loss_fn=mse, reduction="sum")
    torch.testing.assert_close(summed, 4 * loss_of(pipeline, x, y))


def loss_of(pipeline, x, y):
    return pipeline.step(x, y, num_microbatches=4, loss_fn=mse)[0]


def test_batches_in_every_form_and_scales(pool):
    pool.run(batches_in_every_form)


def two_in_one_process():
    one, whole, mine = build("1f1b", seed=1)
    other, whole2, mine2 = build("dualpipev", seed=2)
    x, y = data(4, 0)
    sums, sums2 = None, None
    for _ in range(2):
        loss, _ = one.step(x, y, num_microbatches=4, loss_fn=mse)
        loss2, _ = other.step(y, x, num_microbatches=4, loss_fn=mse)
        expected, sums = truth(whole, one.plan(4), x, y, before=sums)
        expected2, sums2 = truth(whole2, other.plan(4), y, x, before=sums2)
        check_equal([expected, expected2], [loss, loss2])
    for index, chunk in mine.items():
        check_equal(sums[index], [p.grad for p in chunk.parameters()])
    for index, chunk in mine2.items():
        check_equal(sums2[index], [p.grad for p in chunk.parameters()])


def test_two_pipelines_in_one_process(pool):
    pool.run(two_in_one_process)


def replicas_stay_equal():
    pipeline, _, mine = build("dualpipe", seed=dist.get_rank())  # they begin unequal: build makes them equal
    optimizers = [torch.optim.AdamW(chunk.parameters(), lr=0.05) for chunk in mine.values()]
    losses = []
    for step in range(12):
        for _ in range(2):  # two steps accumulate
            loss, _ = pipeline.step(*data(4, step), num_microbatches=4, loss_fn=mse, loss_scale=0.5)
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses, {index: [p.detach() for p in chunk.parameters()] for index, chunk in mine.items()}


def test_the_two_replicas_stay_equal_over_many_steps(pool):
    (losses, one), (losses2, other) = pool.run(replicas_stay_equal)
    assert losses == losses2
    assert losses[-1] < losses[0]
    check_equal(one, other)


def crossing_blocks(group):
    """Return a maker of stages that communicate, as an expert-parallel stage does."""

    def communicate(x):
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    class Crossing(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.parts = nn.Sequential(Block(seed), Cross(communicate), Block(seed + 1), Cross(communicate))

        def forward(self, x):
            return self.parts(x) / 4

    return lambda num_stages, seed: [Crossing(seed + 10 * index) for index in range(num_stages)]


def woven(schedule, strategy):
    """Two pipelines of two ranks, side by side; the stages on ranks 0 and 2, 1 and 3 communicate with each other."""
    rank = dist.get_rank()
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    experts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    make = crossing_blocks(experts[rank % 2])
    count = 8
    pipeline, _, mine = build(schedule, make, group=pipes[rank // 2], strategy=strategy)
    serial, _, mine2 = build(schedule, make, group=pipes[rank // 2], strategy="serial")
    for step in range(2):
        x, y = data(count, step + 10 * (rank // 2))
        if step == 0 and strategy == "turns":  # the first pair of each kind is recorded, and runs serially
            pipeline.step(x, y, num_microbatches=count, loss_fn=mse)
            serial.step(x, y, num_microbatches=count, loss_fn=mse)
        with engine().observe() as log:
            loss, _ = pipeline.step(x, y, num_microbatches=count, loss_fn=mse)
        expected, _ = serial.step(x, y, num_microbatches=count, loss_fn=mse)
        check_equal(expected, loss, "loss")
        for index, chunk in mine.items():
            theirs = [p.grad for p in mine2[index].parameters()]
            check_equal(theirs, [p.grad for p in chunk.parameters()], f"step {step}, stage {index}")
    pairs = sum(len(action.parts) == 2 for action in pipeline.plan(count).ranks[rank % 2])
    return pairs, log.spans


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev"])
def test_pairs_are_woven_by_turns_and_overlap(pool4, schedule):
    for pairs, spans in pool4.run(woven, schedule, "turns"):
        assert pairs > 2
        # each pair's forward gave its turn away while its own communication ran, and its backward too
        away = {
            strand: sum(s.kind == "away" and s.strand == strand for s in spans) for strand in ("forward", "backward")
        }
        assert min(away.values()) >= pairs
        computing = {
            strand: union([(s.begin_ns, s.end_ns) for s in spans if s.strand == strand and s.kind == "compute"])
            for strand in ("forward", "backward")
        }
        waiting = {
            strand: union([(s.begin_ns, s.end_ns) for s in spans if s.strand == strand and s.kind == "away"])
            for strand in ("forward", "backward")
        }
        # while one strand's communication was under way, the other computed, in both directions
        assert length(intersection(waiting["forward"], computing["backward"])) > 0
        assert length(intersection(waiting["backward"], computing["forward"])) > 0


def test_pairs_under_streams(pool4):
    pool4.run(woven, "dualpipev", "streams")


def test_stages_of_says_what_build_takes():
    assert [tw.pipeline.stages_of("dualpipe", rank, 4) for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert [tw.pipeline.stages_of("dualpipev", rank, 2) for rank in range(2)] == [(0, 3), (1, 2)]
    assert tw.pipeline.stages_of("interleaved", 1, 2, num_chunks=3) == (1, 3, 5)


def alone():
    for schedule in ("dualpipev", "zbv", "1f1b", "interleaved"):
        num_stages = len(tw.pipeline.stages_of(schedule, 0, 1))
        whole, own = blocks(num_stages), blocks(num_stages)
        pipeline = tw.pipeline.build(
            own, schedule, group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
        )
        x, y = data(4, 0)
        loss, _ = pipeline.step(x, y, num_microbatches=4, loss_fn=mse)
        expected, sums = truth(whole, pipeline.plan(4), x, y)
        check_equal(expected, loss)
        for index in range(num_stages):
            check_equal(sums[index], [p.grad for p in own[index].parameters()], schedule)


def test_one_rank_with_all_stages(pool):
    pool.run(alone)


def profiled():
    pipeline, _, _ = build("dualpipev")
    x, y = data(4, 0)
    pipeline.step(x, y, num_microbatches=4, loss_fn=mse)
    with torch.profiler.profile() as profile:
        pipeline.step(x, y, num_microbatches=4, loss_fn=mse)
    regions = {event.name for event in profile.events() if event.name.startswith("PP:")}
    row = pipeline.plan(4).ranks[dist.get_rank()]
    return {f"PP:{part}" for action in row for part in (action, *action.parts)} - regions


def test_every_action_is_a_region_of_the_profile(pool):
    assert pool.run(profiled) == [set(), set()]
