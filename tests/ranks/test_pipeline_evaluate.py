"""An evaluation gives the loss and the outputs of one process, under every schedule, and leaves no gradient."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import DIM, check_equal
from pipelines import Block, build, data, mse
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchweave.errors import PipelineError, UsageError
from torchweave.schedule.action import Action
from torchweave.schedule.build import names
from torchweave.schedule.forwards import forwards
from torchweave.schedule.simulate import timeline


def whole_forward(stages, x, y, count):
    outputs = []
    with torch.no_grad():
        for value in x.chunk(count):
            for stage in stages:
                value = stage(value)
            outputs.append(value)
    losses = [mse(output, target) for output, target in zip(outputs, y.chunk(count), strict=True)]
    return torch.stack(losses).mean(), outputs


def check_evaluation(pipeline, stages, count, **arguments):
    x, y = data(count, count)
    loss, outputs = pipeline.evaluate(x, y, num_microbatches=count, loss_fn=mse, **arguments)
    expected, whole = whole_forward(stages, x, y, count)
    check_equal(expected, loss, f"loss of {count} microbatches")
    last = pipeline.num_stages - 1
    assert (outputs is not None) == (last in pipeline.stages)
    for mine, its in zip(outputs or (), whole, strict=bool(outputs)):
        if mine is not None:  # with two replicas the other half is on another rank
            check_equal(its, mine, "outputs")
            assert not mine.requires_grad


def every_schedule():
    count = 2 * dist.get_world_size()
    for schedule in names():
        pipeline, whole, mine = build(schedule)
        for modules in (whole, mine.values()):
            for module in modules:
                module.eval()
        for few in (3, count, 3):  # fewer than a step of some schedules could have, and known shapes again
            check_evaluation(pipeline, whole, few)
        assert all(p.grad is None for chunk in mine.values() for p in chunk.parameters())
        pipeline.step(*data(count, 0), num_microbatches=count, loss_fn=mse)
        before = [p.grad.clone() for chunk in mine.values() for p in chunk.parameters()]
        with torch.inference_mode():
            loss, outputs = pipeline.evaluate(data(count, 0)[0], num_microbatches=count, keep_outputs=False)
        assert loss is None
        assert outputs is None
        check_equal(before, [p.grad for chunk in mine.values() for p in chunk.parameters()], schedule)


def test_every_schedule_on_two_ranks(pool):
    pool.run(every_schedule)


@pytest.mark.long
def test_every_schedule_on_four_ranks(pool4):
    pool4.run(every_schedule)


def plain(num_stages):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num_stages)]


def sharded(chunk, mesh):
    fully_shard(chunk[0], mesh=mesh)
    return fully_shard(chunk, mesh=mesh)


def in_data_parallel(wrap):
    """Evaluate before and after a step, the stages in a wrapper: two pipelines of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))

    def make(num_stages, seed):
        return [wrap(chunk, mesh["data"]) for chunk in plain(num_stages)]

    pipeline, _, _ = build("dualpipev", make, group=mesh["pipe"].get_group())
    whole = plain(4)
    check_evaluation(pipeline, whole, 3)
    pipeline.step(*data(4, 0), num_microbatches=4, loss_fn=mse)
    check_evaluation(pipeline, whole, 4)


def ddp(chunk, mesh):
    return DistributedDataParallel(chunk, process_group=mesh.get_group())


@pytest.mark.parametrize("wrap", [ddp, sharded])
def test_stages_in_a_wrapper(pool4, wrap):
    pool4.run(in_data_parallel, wrap)


class Bad(nn.Module):
    def forward(self, x):
        raise ValueError("planted here")


def mistakes():
    pipeline, _, _ = build("1f1b", lambda count, seed: [Block(seed)] * (count - 1) + [Bad()])
    for arguments in ({"num_microbatches": 0}, {"num_microbatches": 2, "loss_fn": 3}):
        with pytest.raises(UsageError) as caught:
            pipeline.evaluate(torch.ones(4, DIM), **arguments)
        assert caught.value.remedy
    with pytest.raises(PipelineError, match=r"stage 1, action 1F0.*planted here"):
        pipeline.evaluate(torch.ones(4, DIM), num_microbatches=2)


def test_mistakes_and_failures_are_told_on_every_rank(pool):
    pool.run(mistakes)


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 3), (4, 3), (4, 16)])
def test_a_plan_of_forwards_has_each_once_and_no_idle_slot_that_need_not_be(ranks, count):
    plan = forwards(((*range(ranks), *reversed(range(ranks))),), ranks, count)
    assert Counter(action for row in plan.ranks for action in row) == Counter(
        Action(stage, "F", microbatch) for stage in range(2 * ranks) for microbatch in range(count)
    )
    ends = timeline(plan, lambda _: 1.0)
    assert max(row[-1].end for row in ends) <= 2 * count + 2 * (ranks - 1)
