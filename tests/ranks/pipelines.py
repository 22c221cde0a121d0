"""What tests of pipelines share: models in stages, one process that is the truth, and comparison to the bit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import Cross, check_equal
from torch import nn

import torchweave as tw
from torchweave.schedule.passes import only_compute

DIM = 6
ROWS = 2


def cross(value):
    """Communicate with nobody: as a collective of one rank, which a simulated turn may hide."""
    return value * 1.0


class Block(nn.Module):
    """A stage that has a residual, a norm, an operation in place and a weight that is used twice."""

    def __init__(self, seed, wide=DIM):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.outer, self.norm = nn.Linear(DIM, wide), nn.Linear(wide, DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        x = x.mul_(1.25) if x.requires_grad else x * 1.25
        y = self.outer(torch.tanh(self.inner(self.norm(x))))
        return x + torch.relu_(self.outer(torch.tanh(self.inner(y))))


class Even(nn.Module):
    """A stage whose weights can be cut in two, and that changes nothing in place."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.outer = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


def blocks(num_stages, seed=0):
    """Return the whole model, the same on every rank."""
    return [Block(seed + 100 * index, DIM + index % 3) for index in range(num_stages)]


def data(num_microbatches, seed, rows=ROWS):
    """Return inputs and targets of one step."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_microbatches * rows, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def mse(output, target):
    return (output - target).square().mean()


def order_of_weights(plan, stage, direction):
    """Return the microbatches of a stage in the order in which a plan adds their weight gradients."""
    rank = plan.placement[direction][stage]
    return [
        leaf.microbatch
        for action in plan.ranks[rank]
        for leaf in action.leaves()
        if leaf.stage == stage and leaf.kind in ("B", "W") and plan.direction_of(leaf.microbatch) == direction
    ]


def truth(stages, plan, inputs, targets, loss_fn=mse, before=None):
    """Return the loss and every stage's gradients, of one process that sums in the plan's order."""
    count = plan.num_microbatches
    losses, gradients = [], []
    parameters = [list(stage.parameters()) for stage in stages]
    for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
        value = x
        for stage in stages:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        loss = loss_fn(value, y)
        flat = [p for group in parameters for p in group]
        found = iter(torch.autograd.grad(loss, flat, torch.full_like(loss, 1 / count), allow_unused=True))
        gradients.append([[next(found) for _ in group] for group in parameters])
        losses.append(loss.detach())
    sums = []
    for index in range(len(stages)):
        parts = []
        for direction in range(plan.num_directions):
            # with two replicas, what earlier steps have summed must not be summed again
            part = before[index] if before and plan.num_directions == 1 else None
            for microbatch in order_of_weights(plan, index, direction):
                part = added(part, gradients[microbatch][index])
            parts.append(part)
        total = parts[0] if len(parts) == 1 else added(*parts)
        sums.append(added(before[index], total) if before and len(parts) == 2 else total)
    return torch.stack(losses).mean(), sums


def added(total, more):
    """Add lists of gradients, where None is nothing."""
    if total is None:
        return [None if g is None else g.clone() for g in more]
    return [a if b is None else b if a is None else a + b for a, b in zip(total, more, strict=True)]


def build(schedule, make=blocks, num_chunks=None, seed=0, group=None, **options):
    """Return a pipeline and the whole model, of which the pipeline has copies of this rank's stages."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = tw.pipeline.stages_of(schedule, rank, size, num_chunks=num_chunks)
    counted = [tw.pipeline.stages_of(schedule, other, size, num_chunks=num_chunks) for other in range(size)]
    num_stages = 1 + max(stage for stages in counted for stage in stages)
    whole, own = make(num_stages, seed), make(num_stages, seed)
    chunks = [own[index] for index in mine]
    return tw.pipeline.build(chunks, schedule, group=group, **options), whole, dict(zip(mine, chunks, strict=True))


def check_schedule(schedule, num_microbatches, num_chunks=None, num_steps=2, rows=ROWS, seed=0, **options):
    """Raise unless steps of a pipeline have the losses and the gradients of one process, to the bit."""
    pipeline, whole, mine = build(schedule, num_chunks=num_chunks, seed=seed, **options)
    plan = only_compute(pipeline.plan(num_microbatches))
    before = None
    for step in range(num_steps):
        x, y = data(num_microbatches, seed + step, rows + step)
        loss, outputs = pipeline.step(x, y, num_microbatches=num_microbatches, loss_fn=mse)
        expected, before = truth(whole, plan, x, y, before=before)
        check_equal(expected, loss, f"loss of step {step}")
        for index, chunk in mine.items():
            check_equal(before[index], [p.grad for p in chunk.parameters()], f"step {step}, stage {index}")
    return outputs


__all__ = ["Block", "Cross", "build", "check_schedule", "data", "mse", "truth"]


def check_values(schedule, make, loss_fn=mse):
    """Hold two steps of a pipeline of such stages against one process, to the bit."""
    pipeline, whole, mine = build(schedule, make)
    count = 2 * dist.get_world_size()
    plan = only_compute(pipeline.plan(count))
    before = None
    for step in range(2):
        x, y = data(count, step, rows=2 + step)
        loss, _ = pipeline.step(x, y, num_microbatches=count, loss_fn=loss_fn)
        expected, before = truth(whole, plan, x, y, loss_fn, before)
        check_equal(expected, loss, f"loss of step {step}")
        for index, chunk in mine.items():
            check_equal(before[index], [p.grad for p in chunk.parameters()], f"{schedule}, stage {index}")
