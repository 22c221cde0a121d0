"""A pipeline together with DDP, FSDP2, tensor parallelism, activation checkpointing, and weights that stages share."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import DIM, check_equal
from pipelines import Block, Even, blocks, build, data, mse, truth
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchweave as tw
from torchweave.errors import UsageError

COUNT = 4


def grid():
    """Return the pipeline's and the data-parallel group of this rank: two pipelines of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    return mesh["pp"].get_group(), mesh["dp"].get_group(), mesh["dp"]


def averaged(per_replica):
    """Return what DDP makes of two replicas' gradients."""
    one, other = per_replica
    return [a / 2 + b / 2 for a, b in zip(one, other, strict=True)]


def data_parallel(schedule, wrap, gradient_of, exact, strategy="auto"):
    pp, dp, mesh = grid()
    mine = tw.pipeline.stages_of(schedule, pp.rank(), 2)
    num_stages = 4 if schedule != "zb-h1" else 2
    # FSDP2 itself allows no change of an input in place
    whole, own = (blocks(num_stages) if exact else [Even(index) for index in range(num_stages)] for _ in range(2))
    chunks = [wrap(own[index], dp, mesh) for index in mine]
    pipeline = tw.pipeline.build(chunks, schedule, group=pp, strategy=strategy)
    for step in range(2):
        x, y = data(COUNT, step + 10 * dp.rank())
        pipeline.step(x, y, num_microbatches=COUNT, loss_fn=mse)
        per_replica = [truth(whole, pipeline.plan(COUNT), *data(COUNT, step + 10 * r))[1] for r in range(2)]
        for index, chunk in zip(mine, chunks, strict=True):
            expected = averaged([sums[index] for sums in per_replica])
            found = [gradient_of(p) for p in chunk.parameters()]
            if exact:
                check_equal(expected, found, f"step {step}, stage {index}")
            else:  # gathered, reduced and cut by FSDP: the same numbers, summed in another order
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
            chunk.zero_grad()


def with_ddp(module, group, mesh):
    return DistributedDataParallel(module, process_group=group)


def with_fsdp(module, group, mesh):
    fully_shard(module.inner, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def plain_gradient(parameter):
    return parameter.grad


def gathered_gradient(parameter):
    return parameter.grad.full_tensor()


@pytest.mark.parametrize(("schedule", "strategy"), [("dualpipev", "auto"), ("dualpipev", "turns"), ("zb-h1", "auto")])
def test_ddp(pool4, schedule, strategy):
    pool4.run(data_parallel, schedule, with_ddp, plain_gradient, True, strategy)


@pytest.mark.parametrize("strategy", ["auto", "turns"])
def test_fsdp2(pool4, strategy):
    pool4.run(data_parallel, "dualpipev", with_fsdp, gathered_gradient, False, strategy)


def ddp_where_it_cannot_be():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = DistributedDataParallel(nn.Linear(DIM, DIM))

    for module in (Holder(), DistributedDataParallel(nn.Linear(DIM, DIM), find_unused_parameters=True)):
        with pytest.raises(UsageError, match="DDP"):
            tw.pipeline.build([module], "1f1b")


def test_ddp_that_cannot_be_led_is_refused(pool):
    pool.run(ddp_where_it_cannot_be)


def tensor_parallel(strategy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    pp, tp = mesh["pp"].get_group(), mesh["tp"]

    def parallel(stage):
        plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
        return parallelize_module(stage, tp, plan)

    mine = tw.pipeline.stages_of("dualpipev", pp.rank(), 2)
    whole = [Even(index) for index in range(4)]
    chunks = [parallel(Even(index)) for index in mine]
    pipeline = tw.pipeline.build(chunks, "dualpipev", group=pp, strategy=strategy)
    for step in range(2):
        x, y = data(COUNT, step)
        loss, _ = pipeline.step(x, y, num_microbatches=COUNT, loss_fn=mse)
        expected, sums = truth(whole, pipeline.plan(COUNT), x, y)
        # a product that is cut in two sums in another order
        torch.testing.assert_close(loss, expected)
        for index, chunk in zip(mine, chunks, strict=True):
            found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in chunk.parameters()]
            torch.testing.assert_close(found, sums[index], rtol=1e-4, atol=1e-6)
            chunk.zero_grad()


@pytest.mark.parametrize("strategy", ["serial", "turns"])
def test_tensor_parallelism(pool4, strategy):
    pool4.run(tensor_parallel, strategy)


class Recomputed(nn.Module):
    def __init__(self, stage, reentrant):
        super().__init__()
        self.stage, self.reentrant, self.drop = stage, reentrant, nn.Dropout(0.0)

    def forward(self, x):
        return checkpoint(lambda y: self.drop(self.stage(y * 1.0)), x, use_reentrant=self.reentrant)


def recomputing(schedule, reentrant):
    def make(num_stages, seed):
        stages = blocks(num_stages, seed)
        return [Recomputed(stage, reentrant) if index else stage for index, stage in enumerate(stages)]

    pipeline, _, mine = build(schedule, make)
    whole = blocks(1 + max(s for rank in range(2) for s in tw.pipeline.stages_of(schedule, rank, 2)))
    x, y = data(COUNT, 0)
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("torchweave").addHandler(handler)
    for _ in range(2):
        pipeline.step(x, y, num_microbatches=COUNT, loss_fn=mse)
    logging.getLogger("torchweave").removeHandler(handler)
    _, sums = truth(whole, pipeline.plan(COUNT), x, y)
    _, sums = truth(whole, pipeline.plan(COUNT), x, y, before=sums)
    for index, chunk in mine.items():
        check_equal(sums[index], [p.grad for p in chunk.parameters()], f"stage {index}")
    return [text for text in told if "gradients at once" in text]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["zbv", "dualpipe"])
def test_activation_checkpointing(pool, schedule, reentrant):
    told = pool.run(recomputing, schedule, reentrant)
    if schedule == "zbv":  # whose backwards are all split; each stage says it once
        assert [len(texts) for texts in told] == [1, 2]
        assert all("activation checkpointing" in text for texts in told for text in texts)


class First(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x):
        return torch.tanh(x @ self.embedding) * 1.0  # not saved: the next stage changes it in place


class Head(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.block, self.embedding = Block(9), embedding

    def forward(self, x):
        return self.block(x) @ self.embedding.t()


def tied_model(num_stages, between, seed=0):
    """Return an uneven model: an embedding alone, blocks in between, several in one stage, and a head that is tied."""
    torch.manual_seed(seed)
    embedding = nn.Parameter(torch.randn(DIM, DIM))
    middle = [nn.Sequential(*(Block(50 * index + part) for part in range(1 + index % 3))) for index in range(between)]
    return [First(embedding), *middle[: num_stages - 2], Head(embedding)]


def tied_embeddings(schedule):
    size = dist.get_world_size()
    mine = tw.pipeline.stages_of(schedule, dist.get_rank(), size)
    num_stages = size * (1 if schedule in ("1f1b", "dualpipe") else 2)
    whole, own = tied_model(num_stages, num_stages), tied_model(num_stages, num_stages)
    chunks = [own[index] for index in mine]
    holds = [index for index in mine if index in (0, num_stages - 1)]
    tied = {"embedding": own[0].embedding} if holds else {}
    pipeline = tw.pipeline.build(chunks, schedule, tied=tied)
    optimizer = torch.optim.SGD(dict.fromkeys(p for chunk in chunks for p in chunk.parameters()), lr=0.001)
    truths = torch.optim.SGD(dict.fromkeys(p for stage in whole for p in stage.parameters()), lr=0.001)
    for step in range(3):
        x, y = data(2 * size, step)
        loss, _ = pipeline.step(x, y, num_microbatches=2 * size, loss_fn=mse)
        microbatches = zip(x.chunk(2 * size), y.chunk(2 * size), strict=True)
        losses = [mse(nn.Sequential(*whole)(a), b) / (2 * size) for a, b in microbatches]
        sum(losses).backward()
        # a shared weight's parts are summed by stage, and not by microbatch
        torch.testing.assert_close(loss, sum(losses), rtol=1e-5, atol=1e-6)
        for index in mine:
            expected, found = whole[index].parameters(), own[index].parameters()
            torch.testing.assert_close([p.grad for p in found], [p.grad for p in expected], rtol=1e-4, atol=1e-6)
        for each in (optimizer, truths):
            each.step()
            each.zero_grad()
    return own[0].embedding.detach() if holds else None


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", "dualpipev"])
def test_tied_embeddings_and_uneven_stages(pool4, schedule):
    embeddings = [found for found in pool4.run(tied_embeddings, schedule) if found is not None]
    for other in embeddings[1:]:  # equal on all ranks that hold it, to the bit
        check_equal(embeddings[0], other)


def trained(stages, schedule, group, steps):
    """Train some steps; return the losses and the state of this rank's stages."""
    mine = tw.pipeline.stages_of(schedule, dist.get_rank(group), dist.get_world_size(group))
    pipeline = tw.pipeline.build([stages[index] for index in mine], schedule, group=group)
    optimizer = torch.optim.SGD([p for index in mine for p in stages[index].parameters()], lr=0.1)
    losses = []
    for step in steps:
        losses.append(pipeline.step(*data(8, step), num_microbatches=8, loss_fn=mse)[0].item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"stage {index}": stages[index].state_dict() for index in mine}


def saved_and_loaded(folder):
    """Train and save under one schedule on four ranks; go on under others on four, two and one."""
    _, state = trained(blocks(4), "1f1b", dist.group.WORLD, range(3))
    dcp.save(state, checkpoint_id=folder)
    loaded = blocks(4, seed=1)
    found = {f"stage {index}": stage.state_dict() for index, stage in enumerate(loaded)}
    dcp.load(found, checkpoint_id=folder)
    for index, stage in enumerate(loaded):
        stage.load_state_dict(found[f"stage {index}"])
    rank = dist.get_rank()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    alone = dist.new_group([rank], use_local_synchronization=True)
    losses = [
        trained(copy.deepcopy(loaded), schedule, group, range(3, 6))[0]
        for schedule, group in (
            ("1f1b", dist.group.WORLD),
            ("gpipe", dist.group.WORLD),
            ("dualpipev", half),
            ("interleaved", half),
            ("zbv", half),
        )
    ]
    return [*losses, trained([nn.Sequential(*loaded)], "1f1b", alone, range(3, 6))[0]]


def test_a_checkpoint_is_loaded_under_another_schedule_and_rank_count(pool4, tmp_path):
    for found in pool4.run(saved_and_loaded, str(tmp_path)):
        # each microbatch's gradients are added in the same order by these schedules
        assert all(losses == found[0] for losses in found[1:]), found
