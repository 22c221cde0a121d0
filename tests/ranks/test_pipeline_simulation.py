"""A pipeline's step takes as long as its simulation says, with actions whose lengths are known: they sleep."""

import time

import pytest
import torch
import torch.distributed as dist

import torchweave as tw
from torchweave.measure.naps import Sleeper
from torchweave.schedule.build import build
from torchweave.schedule.costs import Costs
from torchweave.schedule.simulate import simulate

FORWARD_S = 0.03


def mean_square(output, target):
    return (output - target).square().mean()


def step_times(name, num_microbatches, num_steps):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    chunks = [Sleeper(FORWARD_S) for _ in tw.pipeline.stages_of(name, rank, num_ranks)]
    stages = tw.pipeline.build(chunks, schedule=name, strategy="serial")
    x = torch.randn(2 * num_microbatches, 4)
    times = []
    for _ in range(num_steps):
        dist.barrier()
        begin = time.perf_counter()
        stages.step(x, x, num_microbatches=num_microbatches, loss_fn=mean_square)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return times[1:]  # the first one learns shapes


@pytest.mark.parametrize("name", ["1f1b", "dualpipev", "dualpipe"])
def test_a_step_takes_what_its_simulation_says(pool, name):
    # catches a runner that waits for what it need not wait for, and a simulation that waits for too little. The upper
    # bound is for a machine that is shared; benchmarks/plan_accuracy.py has the numbers
    costs = Costs(F=FORWARD_S, B=2 * FORWARD_S, W=0.0)
    simulated = simulate(build(name, 2, 4), costs, woven=False).step_time
    for times in pool.run(step_times, name, 4, 4):
        assert 0.99 * simulated < min(times) < 1.35 * simulated
