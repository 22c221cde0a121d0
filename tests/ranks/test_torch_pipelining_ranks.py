"""Schedules of torch.distributed.pipelining, woven: bit-equal to the same schedule left alone, and overlapping."""

from __future__ import annotations

import csv
import gc
import tempfile
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from adapter_cases import DIM, Block, Grid, overlapped_ns
from harness import check_equal, copied
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel

import torchweave as tw
from torchweave.adapters.torch_pipelining import weave_schedule
from torchweave.engine.pair import engine
from torchweave.intervals import intersection, length, union

ROWS, NUM_STEPS = 3, 2


def loss_fn(output, target, weight=1.0):
    if isinstance(output, tuple):
        output = output[0] * output[1]
    return weight * (output - target).square().mean()


def plain(module, grid):
    return module


def ddp(module, grid):
    return DistributedDataParallel(module, process_group=grid.ep_group, bucket_cap_mb=1e-4)


def fsdp(module, grid, frees=False):
    mesh = dist.DeviceMesh.from_group(grid.ep_group, "cpu")
    for layer in module.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=frees)
    return fully_shard(module, mesh=mesh, reshard_after_forward=frees)


def fsdp_that_frees(module, grid):
    return fsdp(module, grid, frees=True)


def dualpipev(stages, num_microbatches, **options):
    return ScheduleDualPipeV(stages, num_microbatches, loss_fn, **options)


def from_csv(stages, num_microbatches, rows, **options):
    """Return a schedule whose plan was read from a file, as plans of one's own are."""
    schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn, **options)
    with tempfile.NamedTemporaryFile("w", newline="", suffix=".csv") as file:
        csv.writer(file).writerows(rows)
        file.flush()
        schedule._load_csv(file.name)
    return schedule


def zero_bubble(stages, num_microbatches, **options):
    """DualPipeV with every pair's backward split: its input gradients in the pair, its weight gradients after it."""

    def split(action):
        if action is None or action.sub_actions is None:
            return [action]
        forward, backward = action.sub_actions
        half = f"{backward.stage_index}I{backward.microbatch_index}"
        return [f"({forward};{half})OVERLAP_F_B", half.replace("I", "W")]

    plan = dualpipev(stages, num_microbatches).pipeline_order
    return from_csv(stages, num_microbatches, [[new for old in plan[rank] for new in split(old)] for rank in plan])


def odd_pairs(stages, num_microbatches, **options):
    """A weight gradient in a pair, a backward named first, one stage in both halves, and halves that depend."""
    actions = [
        "0F0",
        "1F0",
        "0F1;1I0",
        "1F1;0I0",
        "0F2;1W0",
        "0W0",
        "1B1;1F2",
        "0F3;0B1",
        "1B2",
        "0B2",
        "1F3;1B3",
        "0B3",
    ]
    row = [f"({action})OVERLAP_F_B" if ";" in action else action for action in actions]
    return from_csv(stages, num_microbatches, [row], **options)


def one_stage_a_rank(stages, num_microbatches, **options):
    """1F1B on two ranks, as pairs of a forward and a backward of one stage."""
    rows = ["0F0 0F1 0F2;0B0 0F3;0B1 0B2 0B3", "1F0 1F1;1B0 1F2;1B1 1F3;1B2 1B3"]
    pairs = [[f"({action})OVERLAP_F_B" if ";" in action else action for action in row.split()] for row in rows]
    return from_csv(stages, num_microbatches, pairs, **options)


class Case:
    """A schedule, ready to step, the same each time that it is made with the same arguments."""

    def __init__(self, pp, num_microbatches, *, make=dualpipev, wrap=plain, num_outputs=1, exchange=None, **options):
        self.grid, self.num_microbatches, self.num_outputs = Grid(pp), num_microbatches, num_outputs
        torch.manual_seed(31 + dist.get_rank())
        first, num_stages = self.grid.pp_rank, pp if make is one_stage_a_rank else 2 * pp
        indices = [first] if num_stages == pp else [first, num_stages - 1 - first]
        dropout = options.pop("dropout", 0.0)
        self.modules = [wrap(Block(exchange or self.grid.exchange, num_outputs, dropout), self.grid) for _ in indices]
        self.loss_kwargs, self.bias = options.pop("loss_kwargs", None), options.pop("bias", False)
        self.return_outputs = options.pop("return_outputs", True)
        stages = [
            PipelineStage(module, index, num_stages, torch.device("cpu"), group=self.grid.pp_group)
            for module, index in zip(self.modules, indices, strict=True)
        ]
        self.schedule = make(stages, num_microbatches, **options)

    def step(self, number):
        """Run one step; return everything that it computes."""
        generator = torch.Generator().manual_seed(100 * number + self.grid.ep_rank)
        size = (ROWS * self.num_microbatches, DIM)
        x, target = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        arguments = (x,) if self.num_outputs == 1 else (x, torch.arange(size[0]).unsqueeze(1) % 3)
        losses: list = []
        output = self.schedule.step(
            *(arguments if self.grid.pp_rank == 0 else ()),
            target=target,
            losses=losses,
            return_outputs=self.return_outputs,
            # torch 2.11 hands it to the stages
            **({"loss_kwargs": self.loss_kwargs} if self.loss_kwargs is not None else {}),
            **({"bias": torch.linspace(0, 1, size[0]).unsqueeze(1)} if self.bias else {}),
        )
        grads = [parameter.grad for module in self.modules for parameter in module.parameters()]
        num_kept = sum(len(stage.output_chunks) for stage in self.schedule._stages)
        result = copied([losses, output, grads, torch.get_rng_state(), num_kept])
        for module in self.modules:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
            module.zero_grad()
        return result


def run(strategy, case, options):
    """Run a case's steps; return the results, and how long its strands overlapped in each step, ns."""
    made = Case(*case, **options)
    if strategy is not None:
        assert weave_schedule(made.schedule, strategy=strategy) is made.schedule
    results, overlaps = [], []
    for number in range(NUM_STEPS):
        with engine().observe() as log:
            results.append(made.step(number))
        overlaps.append(overlapped_ns(log.spans))
    return results, overlaps


def compare(case, options, strategies):
    expected, _ = run(None, case, options)
    assert all(grad is not None and grad.abs().sum() > 0 for _, _, grads, *_ in expected for grad in grads)
    overlaps = {}
    for strategy in strategies:
        found, overlaps[strategy] = run(strategy, case, options)
        check_equal(expected, found, strategy)
    return overlaps


def woven(pool, case, strategies=("turns", "auto", "serial"), **options):
    """Check that a case is equal to the bit by every strategy, on every rank, and return the overlaps by rank."""
    overlaps = pool.run(compare, case, options, strategies)
    for told in overlaps:
        assert told.get("serial", [0]) == [0] * len(told.get("serial", [0])), told
    return overlaps


def check_overlaps(overlaps, strategies=("turns",)):
    for told in overlaps:
        for strategy in strategies:
            # the first pair of a kind is recorded, so that a first step may have nothing else
            assert told[strategy][-1] > 0, f"{strategy} did not overlap: {overlaps}"


def test_one_rank_a_pipeline(pool):
    """Catches what the bend of the V does wrong: both stages on one rank, tensors handed over and not sent."""
    check_overlaps(woven(pool, (1, 5), strategies=("turns", "auto", "serial", "streams")))


def test_two_ranks_a_pipeline(pool4):
    """Catches a receive that is not waited for, or waited for twice, and sends that a pair swallows."""
    check_overlaps(woven(pool4, (2, 6)))


def test_stages_that_free_their_parameters_after_each_forward(pool4):
    """Catches pairs of one kind of which some gather and others need not, because a backward has been in between."""
    check_overlaps(woven(pool4, (2, 5), strategies=("turns",), wrap=fsdp_that_frees))


def test_two_ranks_with_nothing_to_hide(pool):
    """Catches an `auto` that does more than the schedule would do where stages do not communicate."""
    for told in woven(pool, (2, 5)):
        assert told["auto"] == [0, 0], told


@pytest.mark.parametrize(
    "options",
    [
        {"num_outputs": 2, "loss_kwargs": {"weight": 0.5}},
        {"bias": True, "return_outputs": False, "scale_grads": False},
        {"dropout": 0.5},
        {"wrap": ddp},
        {"wrap": fsdp},
        {"make": zero_bubble},
        {"make": odd_pairs},
    ],
    ids=lambda options: " ".join(map(str, options)) + getattr(next(iter(options.values())), "__name__", ""),
)
def test_what_a_step_may_be_given(pool, options):
    """Catches arguments of `step` that a pair forgets, and stages whose state belongs to a strand."""
    check_overlaps(woven(pool, (1, 4), strategies=("turns", "auto"), **options))


class Clock:
    """When a stage communicated, for long and at no cost to the processor, and when it computed before that, ns."""

    communicates_s, computes_s = 0.01, 0.004

    def __init__(self):
        self.times = {"communicates": [], "computes": []}

    def exchange(self, x):
        begin = time.perf_counter_ns()
        while time.perf_counter_ns() < begin + 1e9 * self.computes_s:
            torch.ones(8).sum()
        middle = time.perf_counter_ns()
        self.times["computes"].append((begin, middle))
        with tw.communication():
            begin = time.perf_counter_ns()
            time.sleep(self.communicates_s)
            self.times["communicates"].append((begin, time.perf_counter_ns()))
        return x.clone()

    def hidden_s(self):
        """Return how long a stage computed while one communicated."""
        return length(intersection(union(self.times["communicates"]), union(self.times["computes"]))) / 1e9


def run_slow(strategy):
    """Four ranks of one pipeline; return for the second step how long communication was hidden, and how many pairs."""
    clock = Clock()
    made = Case(4, 9, exchange=clock.exchange)
    if strategy is not None:
        weave_schedule(made.schedule, strategy=strategy)
    results = [made.step(0)]
    for times in clock.times.values():
        times.clear()
    results.append(made.step(1))
    row = made.schedule.pipeline_order[made.grid.pp_rank]
    return results, clock.hidden_s(), sum("OVERLAP" in str(action) for action in row)


def test_a_pair_hides_communication_behind_computation(pool4):
    """Catches pairs that are right and hide nothing, and a measure that is above zero whatever ran."""
    alone = pool4.run(run_slow, None)
    found = pool4.run(run_slow, "turns")
    for (expected, before, _), (results, after, num_pairs) in zip(alone, found, strict=True):
        check_equal(expected, results)
        assert before == 0
        # each strand computes twice before it communicates, and the other one then communicates
        assert after > 0.3 * num_pairs * 4 * Clock.computes_s, (before, after, num_pairs)


def run_named():
    made = Case(1, 4)
    weave_schedule(made.schedule, strategy="turns")
    made.step(0)
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everywhere) as profile:
        made.step(1)
    return {event.name for event in profile.events() if event.name.startswith("PP:")}, str(made.schedule.pipeline_order)


def test_both_actions_of_a_pair_have_their_names_in_a_profile(pool):
    """Catches a strand that a profile, and so `torchweave why`, cannot tell from another microbatch's."""
    for names, plan in pool.run(run_named):
        assert {"PP:0F3", "PP:1B2", "PP:(0F3;1B2)OVERLAP_F_B"} <= names, (names, plan)


class PlantedError(Exception):
    """An error of the user's own."""


def run_failing(where):
    """Fail in one half of the second step's first pair, alike on both ranks, and step again with another schedule."""
    made = Case(1, 4)
    weave_schedule(made.schedule, strategy="turns")
    made.step(0)
    pairs, armed = made.schedule._comp_type_to_function_map, []
    overlap = next(iter(pairs))
    own = pairs[overlap]

    def arming(action, context):
        armed.append(where)
        own(action, context)
        armed.clear()

    def fail(grad):
        if armed == ["backward"]:
            raise PlantedError("planted in the backward")
        return grad

    def watch(module, inputs):
        if armed == ["forward"]:
            raise PlantedError("planted in the forward")

    def hook(module, inputs, output):
        output.register_hook(fail)

    for module in made.modules:
        module.layers[4].register_forward_pre_hook(watch)
        module.layers[4].register_forward_hook(hook)
    pairs[overlap] = arming
    try:
        made.step(1)
    except Exception as error:
        story = []
        while error is not None:
            story.append(f"{type(error).__name__}: {error}")
            error = error.__cause__
    again = Case(1, 4)
    weave_schedule(again.schedule, strategy="turns")
    return story, [again.step(number) for number in range(NUM_STEPS)]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_pair_is_raised_as_torch_raises_it_and_nothing_hangs(pool, where):
    """Catches a swallowed error, and a strand that waits for ever for the one that failed."""
    expected = pool.run(run, None, (1, 4), {})
    for (story, results), (wanted, _) in zip(pool.run(run_failing, where), expected, strict=True):
        assert story[0].startswith("RuntimeError")
        assert f"ailed to run {'forward' if where == 'forward' else 'stage backward'}" in story[0], story
        assert f"PlantedError: planted in the {where}" in story[-1], story
        check_equal(wanted, results)


def test_pairs_of_one_stage(pool4):
    """Catches halves that take each other's microbatch, inputs or gradients, because they have the same stage."""
    check_overlaps(woven(pool4, (2, 4), make=one_stage_a_rank, strategies=("turns",)))


def test_pairs_of_one_stage_in_ddp_stay_serial(pool4):
    """Catches two strands that enter the no_sync() of one module, each of which would end the other's."""
    for told in woven(pool4, (2, 4), make=one_stage_a_rank, wrap=ddp, strategies=("auto",)):
        assert told["auto"] == [0, 0], told


def run_eval(is_woven):
    """Step without a backward, and then with one. (With two stages a rank torch's own runtime fails in the first.)"""
    made = Case(2, 4, make=one_stage_a_rank)
    if is_woven:
        weave_schedule(made.schedule, strategy="turns")
    x = torch.randn(4 * ROWS, DIM, generator=torch.Generator().manual_seed(made.grid.ep_rank))
    with torch.no_grad():
        output = made.schedule.eval(*((x,) if made.grid.pp_rank == 0 else ()), target=x, losses=(losses := []))
    return [*copied([output, losses]), *(made.step(number) for number in range(NUM_STEPS))]


def test_eval_does_what_it_does_without_weave(pool4):
    """Catches a backward in a schedule that has none, and a record of such a pair that later ones are held to."""
    expected = pool4.run(run_eval, False)
    check_equal(expected, pool4.run(run_eval, True))
    assert len(expected[-1][1]) == 4


def run_gone():
    made = Case(1, 4)
    weave_schedule(made.schedule)
    made.step(0)
    schedule, module = weakref.ref(made.schedule), weakref.ref(made.modules[0])
    gc.disable()
    try:
        del made
        return schedule() is None, module() is None
    finally:
        gc.enable()


def test_a_woven_schedule_goes_with_its_last_reference(pool):
    """Catches a cycle through the schedule, which would keep all its stages until Python collects cycles."""
    assert pool.run(run_gone) == [(True, True)] * 2
