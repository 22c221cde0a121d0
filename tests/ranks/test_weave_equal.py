"""A woven pair equals backward, then forward, to the bit: whatever state, mode, hook or wrapper the strands use."""

from __future__ import annotations

import contextlib
import contextvars
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from harness import (
    DIM,
    Cross,
    Pair,
    chain_of,
    check_equal,
    check_pairs,
    chunk,
    gradients,
    inputs,
    pair_of,
    run_plainly,
    run_woven,
)
from operations import all_reduce, all_to_all_single, functional_all_reduce, late_wait
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchweave as tw

STRATEGIES = ("turns", "streams", "auto")
WOVEN = {"turns": "woven", "streams": "woven", "auto": "woven"}
NO_STREAMS = {**WOVEN, "streams": "refused"}
SERIAL = {"turns": "refused", "streams": "refused", "auto": "serial"}
CASES = {}


def case(ways=WOVEN, num_steps=3):
    """Register a maker of pairs, with how each strategy has to run them."""

    def register(make):
        CASES[make.__name__] = (make, ways, num_steps)
        return make

    return register


class Within(nn.Module):
    """Runs a module inside contexts that are made anew at each call."""

    def __init__(self, module, *contexts):
        super().__init__()
        self.module, self.contexts = module, contexts

    def forward(self, x):
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            return self.module(x)


class Checkpointed(nn.Module):
    def __init__(self, module, **options):
        super().__init__()
        self.module, self.options = module, options

    def forward(self, x):
        return checkpoint(self.module, x, **self.options)


def crossings(num=2, communicate=all_to_all_single):
    return [Cross(communicate) for _ in range(num)]


# ---- several groups, uneven strands ----


@case()
def plain_chunks():
    return pair_of(chunk(*crossings()), chunk(*crossings()))


@case()
def the_same_chunk_in_both_strands():
    """Gradients accumulate in the parameters that the forward reads."""
    one = chunk(*crossings())
    return pair_of(one, one)


@case()
def more_crossings_in_the_forward():
    return pair_of(chunk(*crossings(5)), chunk(*crossings(1)))


@case()
def more_crossings_in_the_backward():
    return pair_of(chunk(*crossings(1)), chunk(*crossings(5, late_wait)))


@case()
def no_crossing_in_the_forward():
    return pair_of(chunk(), chunk(*crossings()))


@case()
def no_crossing_in_the_backward():
    return pair_of(chunk(*crossings()), chunk())


@case({"turns": "woven", "streams": "woven", "auto": "serial"})
def no_crossing_at_all():
    return pair_of(chunk(), chunk())


def _reduce_on(group, x):
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


@case()
def two_groups_over_the_same_ranks():
    other = dist.new_group()
    return pair_of(
        chunk(Cross(partial(_reduce_on, other)), *crossings(1)), chunk(*crossings(1), Cross(partial(_reduce_on, other)))
    )


@case({"turns": "woven", "streams": "woven", "auto": "serial"})
def groups_of_one():
    alone = dist.new_subgroups(1)[0]
    return pair_of(chunk(Cross(partial(_reduce_on, alone))), chunk(Cross(partial(_reduce_on, alone))))


@case()
def a_group_of_one_beside_the_world():
    alone = dist.new_subgroups(1)[0]
    return pair_of(
        chunk(Cross(partial(_reduce_on, alone)), *crossings()), chunk(*crossings(), Cross(partial(_reduce_on, alone)))
    )


@case()
def functional_on_a_group_of_one():
    alone = dist.new_subgroups(1)[0]

    def mixed(x):
        return funcol.all_reduce(x, "sum", alone) + funcol.all_reduce(x, "sum", dist.group.WORLD)

    return pair_of(chunk(Cross(mixed)), chunk(Cross(mixed)))


# ---- what begins or ends outside of the pair ----


@case()
def results_that_are_waited_for_after_the_pair():
    """The forward hands out an asynchronous tensor and a Work; the caller waits."""
    c0, c1 = chunk(*crossings()), chunk(*crossings())

    def pair(step):
        made = pair_of(c0, c1)(step)
        kept = []

        def forward():
            y, loss = made.forward()
            z = y.detach().clone()
            kept.append((dist.all_reduce(z, async_op=True), z))
            with torch.no_grad():
                kept.append(funcol.all_reduce(y.detach(), "sum", dist.group.WORLD))
            return y, loss

        def results():
            (work, z), asynchronous = kept
            work.wait()
            return [made.results(), z, asynchronous + 0]

        return Pair(forward, made.backward, results)

    return pair


@case()
def works_that_were_started_before_the_pair():
    c0, c1 = chunk(*crossings()), chunk(*crossings())

    def pair(step):
        made = pair_of(c0, c1)(step)
        x, y = inputs(step, 5).detach(), inputs(step, 6).detach()
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
        asynchronous = funcol.all_reduce(inputs(step, 7).detach(), "sum", dist.group.WORLD)

        def forward():
            works[0].wait()
            out = made.forward()
            return out, x + asynchronous

        def backward():
            made.backward()
            works[1].wait()

        return Pair(forward, backward, lambda: [made.results(), x, y])

    return pair


@case()
def works_that_wait_in_another_order_than_they_were_started():
    def tangled(x):
        parts = [x * (i + 1) for i in range(4)]
        works = [dist.all_reduce(part, async_op=True) for part in parts]
        for i in (2, 0, 3, 1):
            works[i].wait()
        return sum(parts)

    return pair_of(chunk(Cross(tangled)), chunk(Cross(tangled), *crossings()))


# ---- functional collectives with gradient, DTensor, torch.distributed.nn ----


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@case()
def functional_with_gradient():
    world = dist.group.WORLD

    def mix(x):
        rows = [x.shape[0] // 2] * 2
        x = funcol.all_to_all_single_autograd(x, rows, rows, world)
        x = funcol.all_gather_tensor_autograd(x, 0, world)
        return funcol.reduce_scatter_tensor_autograd(x * 1.5, "sum", 0, world)

    return pair_of(chunk(Call(mix), Call(mix)), chunk(Call(mix)))


@case()
def distributed_nn_functional():
    import torch.distributed.nn.functional as dnf

    world = dist.group.WORLD

    def mix(x):
        x = dnf.all_to_all_single(torch.empty_like(x), x, group=world)
        x = dnf.all_reduce(x, group=world) * 0.5
        parts = dnf.all_gather(x, group=world)
        return parts[0] * parts[1] + dnf.broadcast(x, 0, group=world)

    return pair_of(chunk(Call(mix)), chunk(Call(mix), Call(mix)))


@case()
def dtensor_layers():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def block():
        layers = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM), nn.Tanh())
        layers = nn.Sequential(layers, nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)))
        for part in layers:
            parallelize_module(part, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return layers

    return pair_of(block(), block())


@case()
def dtensor_redistribute():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def mix(x):
        y = DTensor.from_local(x, mesh, [Shard(0)])
        return (y.redistribute(mesh, [Shard(1)]) * 2).redistribute(mesh, [Replicate()]).to_local().chunk(2)[0]

    return pair_of(chunk(Call(mix)), chunk(Call(mix)))


# ---- random state, checkpointing ----


@case()
def dropout_in_the_forward():
    return pair_of(chunk(nn.Dropout(0.5), *crossings(), nn.Dropout(0.3)), chunk(*crossings()))


@case(NO_STREAMS)
def random_draws_after_every_crossing():
    def noisy(x):
        return all_to_all_single(x) + torch.rand_like(x)

    return pair_of(
        chunk(Cross(noisy), Cross(noisy)), Checkpointed(chunk(nn.Dropout(0.5), *crossings()), use_reentrant=False)
    )


@case(NO_STREAMS)
def checkpoint_reentrant():
    def block():
        return nn.Sequential(
            chunk(), *(Checkpointed(chunk(nn.Dropout(0.5), *crossings()), use_reentrant=True) for _ in range(2))
        )

    return pair_of(block(), block())


@case(NO_STREAMS)
def checkpoint_not_reentrant():
    def block():
        return nn.Sequential(
            *(Checkpointed(chunk(nn.Dropout(0.5), *crossings()), use_reentrant=False) for _ in range(2))
        )

    return pair_of(block(), block())


@case()
def checkpoint_without_random_state():
    def block():
        return Checkpointed(chunk(*crossings()), use_reentrant=False, preserve_rng_state=False)

    return pair_of(block(), block())


@case(SERIAL)
def checkpoint_that_draws_for_good():
    """preserve_rng_state=False with dropout: the recompute advances the generator; a serial run's forward sees that."""

    def block():
        return Checkpointed(
            chunk(nn.Dropout(0.5), *crossings()),
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )

    return pair_of(block(), block())


@case(NO_STREAMS)
def checkpoint_within_checkpoint():
    def block():
        inner = Checkpointed(chunk(nn.Dropout(0.5), *crossings(1)), use_reentrant=False)
        return Checkpointed(nn.Sequential(inner, chunk(*crossings(1))), use_reentrant=False)

    return pair_of(block(), block())


def _keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


@case(NO_STREAMS)
def selective_checkpoint():
    def block():
        contexts = partial(create_selective_checkpoint_contexts, _keep_products)
        module = chunk(nn.Dropout(0.5), Cross(functional_all_reduce), *crossings(1))
        return Checkpointed(module, use_reentrant=False, context_fn=contexts)

    return pair_of(block(), block())


# ---- modes of a thread ----


def _cpu_autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype=dtype, **options)


@case()
def autocast_inside():
    return pair_of(Within(chunk(*crossings()), _cpu_autocast), Within(chunk(*crossings()), _cpu_autocast))


@case()
def autocast_inside_the_same_chunk():
    """Both strands cast the same weights: the cache of casts is the process's."""
    one = Within(chunk(*crossings(), *crossings()), _cpu_autocast)
    return pair_of(one, one)


@case()
def autocast_nested():
    inner = Within(nn.Sequential(Call(torch.Tensor.float), chunk(*crossings(1))), partial(_cpu_autocast, enabled=False))
    half = Within(nn.Sequential(chunk(*crossings(1)), inner, chunk(*crossings(1))), _cpu_autocast, _cpu_autocast)
    return pair_of(half, Checkpointed(half, use_reentrant=False, preserve_rng_state=False))


@case()
def tensor_and_module_hooks_that_communicate():
    def block():
        one = chunk(*crossings())
        one[0].register_forward_hook(lambda _m, _i, y: all_reduce(y.detach()) * 0.01 + y)
        one[2].register_full_backward_hook(lambda _m, gi, _go: (late_wait(gi[0]), *gi[1:]))
        one[0].weight.register_hook(lambda g: all_reduce(g))
        return one

    return pair_of(block(), block())


@case()
def accumulate_hooks_that_communicate():
    """What data-parallel wrappers do by themselves: reduce a gradient when it is there."""

    def block():
        one = chunk(*crossings())
        for parameter in one.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        return one

    return pair_of(block(), block())


@case()
def save_on_cpu():
    from torch.autograd.graph import save_on_cpu as saved

    block = Within(chunk(*crossings()), saved)
    return pair_of(
        block, Checkpointed(Within(chunk(*crossings()), saved), use_reentrant=False, preserve_rng_state=False)
    )


@case()
def saved_tensor_hooks_forbidden():
    def forbidden():
        return torch.autograd.graph.disable_saved_tensors_hooks("not here")

    return pair_of(Within(chunk(*crossings()), forbidden), chunk(*crossings()))


@case()
def several_backwards():
    c0, c1 = chunk(*crossings(3)), chunk(*crossings())

    def pair(step):
        x0, x1 = inputs(step, 0), inputs(step, 1)
        y = c1(x1)
        losses = [y.sum(), y.square().mean(), y.exp().mean()]

        def backward():
            losses[0].backward(retain_graph=True)
            losses[1].backward(retain_graph=True)
            torch.autograd.backward([losses[2], y.mean()], [torch.tensor(2.0), None], inputs=[x1, *c1.parameters()])

        return Pair(lambda: c0(x0), backward, lambda: [gradients(c1), x1.grad])

    return pair


@case()
def grad_inside_the_forward():
    """A gradient penalty: `autograd.grad` with crossings inside the forward strand."""
    c0, c1 = chunk(), chunk(*crossings(4))

    def pair(step):
        x0, x1 = inputs(step, 0), inputs(step, 1)
        loss = c1(x1).square().sum()

        def forward():
            y = c0(x0)
            y = funcol_sum(y)
            (gradient,) = torch.autograd.grad(y.sum(), x0, create_graph=True)
            return y.mean() + all_reduce_with_gradient(gradient).square().mean()

        return Pair(forward, lambda: loss.backward(), lambda: [gradients(c1), x1.grad])

    return pair


def funcol_sum(x):
    return funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def all_reduce_with_gradient(x):
    return funcol.reduce_scatter_tensor_autograd(torch.cat([x, x * 2]), "sum", 0, dist.group.WORLD)


@case()
def double_backward():
    c0, c1 = chunk(*crossings(3)), nn.Sequential(chunk(), Call(funcol_sum), chunk())

    def pair(step):
        x0, x1 = inputs(step, 0), inputs(step, 1)
        y = c1(x1).square().sum()

        def backward():
            (gradient,) = torch.autograd.grad(y, x1, create_graph=True)
            gradient.square().sum().backward()

        return Pair(lambda: c0(x0), backward, lambda: [gradients(c1), x1.grad])

    return pair


# ---- numerical settings of the process ----


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = Cross(all_to_all_single), Cross(late_wait)
        self.flags = []

    def forward(self, x):
        q = self.before(x).view(1, 1, *x.shape)
        y = self.after(F.scaled_dot_product_attention(q, q, q).view(x.shape))
        self.flags.append(torch._C._get_flash_sdp_enabled())
        return y


def _only_math():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


@case(NO_STREAMS)
def sdpa_backend_around_the_forward():
    other = Checkpointed(nn.Sequential(chunk(), Attention()), use_reentrant=False, preserve_rng_state=False)
    pair = pair_of(Within(nn.Sequential(chunk(), Attention()), _only_math), other)

    def with_flags(step):
        one = pair(step)
        return one._replace(results=lambda: [one.results(), other.module[1].flags, torch._C._get_flash_sdp_enabled()])

    return with_flags


@case(NO_STREAMS)
def sdpa_backend_inside_the_backward():
    inner = Within(nn.Sequential(chunk(), Attention()), _only_math)
    other = nn.Sequential(chunk(), Attention())
    pair = pair_of(other, Checkpointed(inner, use_reentrant=False, preserve_rng_state=False))

    def with_flags(step):
        one = pair(step)
        return one._replace(results=lambda: [one.results(), other[1].flags, torch._C._get_flash_sdp_enabled()])

    return with_flags


@contextlib.contextmanager
def _float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _makes_constants(x):
    y = all_to_all_single(x)
    return (y + torch.ones(1) * torch.tensor(0.1)).to(x.dtype)


@case(NO_STREAMS)
def default_dtype_inside_the_forward():
    return pair_of(
        Within(chunk(Cross(_makes_constants)), _float64), chunk(Cross(_makes_constants), Cross(_makes_constants))
    )


@case(NO_STREAMS)
def deterministic_inside_the_forward():
    @contextlib.contextmanager
    def deterministic():
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    seen = []

    def note(x):
        y = all_to_all_single(x)
        seen.append(torch.are_deterministic_algorithms_enabled())
        return y

    back = chunk(Cross(note), Cross(note))
    pair = pair_of(Within(chunk(*crossings()), deterministic), back)

    def with_flags(step):
        one = pair(step)
        return one._replace(results=lambda: [one.results(), list(seen)])

    return with_flags


@case(SERIAL)
def backward_leaves_a_setting_changed():
    """The default dtype that the backward leaves is the forward's in a serial run."""
    c0, c1 = chunk(*crossings()), chunk(*crossings())

    def pair(step):
        one = pair_of(c0, c1)(step)

        def backward():
            one.backward()
            torch.set_float32_matmul_precision("high")

        def results():
            torch.set_float32_matmul_precision("highest")
            return one.results()

        return Pair(one.forward, backward, results)

    return pair


@case(NO_STREAMS)
def forward_leaves_a_setting_changed():
    """A serial run leaves what the forward set; so must a woven one."""
    c0, c1 = chunk(*crossings()), chunk(*crossings(4))

    def pair(step):
        one = pair_of(c0, c1)(step)

        def forward():
            torch.set_float32_matmul_precision("high")
            return one.forward()

        def results():
            left = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            return [one.results(), left]

        return Pair(forward, one.backward, results)

    return pair


@case(SERIAL)
def backward_seeds_the_generator():
    c0, c1 = chunk(nn.Dropout(0.5), *crossings()), chunk(*crossings())

    def pair(step):
        one = pair_of(c0, c1)(step)

        def backward():
            one.backward()
            torch.manual_seed(5)

        return Pair(one.forward, backward, one.results)

    return pair


@case(SERIAL)
def backward_draws_random_numbers():
    noisy = Cross(lambda x: all_to_all_single(x) + torch.rand_like(x))
    return pair_of(chunk(nn.Dropout(0.5), *crossings()), chunk(noisy))


# ---- shared module state ----


@case(SERIAL)
def the_same_batch_norm_recomputed():
    one = Checkpointed(chunk(nn.BatchNorm1d(DIM), *crossings()), use_reentrant=False)
    pair = pair_of(one, one)

    def with_buffers(step):
        made = pair(step)
        return made._replace(results=lambda: [made.results(), list(one.buffers())])

    return with_buffers


@case()
def the_same_batch_norm_without_recompute():
    one = chunk(nn.BatchNorm1d(DIM), *crossings())
    pair = pair_of(one, one)

    def with_buffers(step):
        made = pair(step)
        return made._replace(results=lambda: [made.results(), list(one.buffers())])

    return with_buffers


@case(SERIAL)
def an_optimizer_inside_the_backward():
    one = chunk(*crossings())
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    pair = pair_of(one, one)

    def stepping(step):
        made = pair(step)

        def backward():
            made.backward()
            optimizer.step()

        return Pair(made.forward, backward, lambda: [made.results(), list(one.parameters())])

    return stepping


@case(SERIAL)
def an_optimizer_in_accumulate_hooks():
    """The optimizer-in-backward recipe: each parameter steps as soon as its gradient is there."""
    one = chunk(*crossings())
    for parameter in one.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step_now(_, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_now)
    pair = pair_of(one, one)

    def stepping(step):
        made = pair(step)
        return made._replace(results=lambda: [made.results(), list(one.parameters())])

    return stepping


@case(SERIAL)
def weights_written_by_hand_in_the_backward():
    one = chunk(*crossings())

    def write(parameter):
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)

    one[0].weight.register_post_accumulate_grad_hook(write)
    pair = pair_of(one, one)

    def stepping(step):
        made = pair(step)
        return made._replace(results=lambda: [made.results(), list(one.parameters())])

    return stepping


@case()
def spectral_norm_of_two_chunks():
    from torch.nn.utils.parametrizations import spectral_norm

    def block():
        one = chunk(*crossings())
        spectral_norm(one[0])
        return one

    c0, c1 = block(), block()
    pair = pair_of(c0, c1)

    def with_buffers(step):
        made = pair(step)
        return made._replace(results=lambda: [made.results(), list(c0.buffers()), list(c1.buffers())])

    return with_buffers


@case()
def cached_parametrizations():
    from torch.nn.utils import parametrize

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).mT

    def block():
        one = chunk(*crossings())
        parametrize.register_parametrization(one[0], "weight", Symmetric())
        return Within(one, parametrize.cached)

    return pair_of(block(), Checkpointed(block(), use_reentrant=False, preserve_rng_state=False))


# ---- DDP, FSDP ----


@case(SERIAL)
def ddp_with_gradient_synchronization():
    from torch.nn.parallel import DistributedDataParallel

    module = chunk(*crossings())
    one = DistributedDataParallel(module)
    pair = pair_of(one, one)
    return lambda step: pair(step)._replace(results=lambda: gradients(module))


def _ddp_of_its_own(forward_too):
    from torch.nn.parallel import DistributedDataParallel

    modules = [chunk(*crossings()), chunk(*crossings())]
    backward = DistributedDataParallel(modules[1])
    pair = pair_of(DistributedDataParallel(modules[0]) if forward_too else modules[0], backward)
    return lambda step: pair(step)._replace(results=lambda: gradients(*modules))


@case(NO_STREAMS)
def ddp_that_synchronizes_in_the_backward_alone():
    return _ddp_of_its_own(False)


@case(NO_STREAMS)
def ddp_that_synchronizes_in_either_strand():
    return _ddp_of_its_own(True)


@case()
def ddp_without_gradient_synchronization():
    from torch.nn.parallel import DistributedDataParallel

    module = chunk(*crossings())
    one = DistributedDataParallel(module)
    one.require_backward_grad_sync = False  # what no_sync() does, for as long as the pairs are made and run
    return pair_of(one, one)


@case(SERIAL)
def fsdp_that_reshards():
    from torch.distributed.fsdp import fully_shard

    one = chunk(*crossings())
    fully_shard(one)
    shards = list(one.parameters())
    pair = pair_of(one, one)
    return lambda step: pair(step)._replace(results=lambda: [p.grad.to_local() for p in shards])


@case(NO_STREAMS)
def fsdp_without_resharding():
    from torch.distributed.fsdp import fully_shard

    one = chunk(*crossings())
    fully_shard(one, reshard_after_forward=False)
    one.set_reshard_after_backward(False)
    shards = list(one.parameters())
    pair = pair_of(one, one)
    return lambda step: pair(step)._replace(results=lambda: [p.grad.to_local() for p in shards])


@case(NO_STREAMS)
def fsdp_without_resharding_as_in_a_pipeline():
    """FSDP2 keeps one training state a module: a forward that sees the backward's registers no hooks for its own."""
    from torch.distributed.fsdp import fully_shard

    one = chunk(*crossings())
    fully_shard(one, reshard_after_forward=False)
    one.set_reshard_after_backward(False)
    shards = list(one.parameters())
    pair = chain_of(one)
    return lambda step: pair(step)._replace(results=lambda: [p.grad.to_local() for p in shards])


@case()
def ddp_as_in_a_pipeline():
    from torch.nn.parallel import DistributedDataParallel

    one = DistributedDataParallel(chunk(*crossings()))
    one.require_backward_grad_sync = False
    return chain_of(one)


@case()
def a_chunk_as_in_a_pipeline():
    return chain_of(chunk(nn.Dropout(0.5), *crossings()))


@case(NO_STREAMS)
def a_checkpointed_chunk_as_in_a_pipeline():
    return chain_of(
        nn.Sequential(*(Checkpointed(chunk(nn.Dropout(0.5), *crossings()), use_reentrant=False) for _ in range(2)))
    )


@case()
def an_expert_that_gets_no_tokens():
    """On one rank or another an expert is left out, by the data: the graph differs, the communication does not."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = Cross(all_to_all_single), Cross(all_to_all_single)
            self.experts = nn.ModuleList([nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())])

        def forward(self, x):
            x = self.before(x)
            chosen = x[:, 0] > 0.2
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == bool(number)).nonzero()[:, 0]
                if len(rows):
                    y = y.index_add(0, rows, expert(x[rows]))
            return self.after(y)

    def block():
        return nn.Sequential(Experts(), nn.Tanh(), Experts())

    return pair_of(block(), block())


def alternating(part):
    """Two chunks a rank, as DualPipeV has them: the same lines of code run pairs that communicate differently."""
    chunks = [chunk(*(part() for _ in range(2))), chunk(*(part() for _ in range(4)))]

    def pair(step):
        return pair_of(chunks[0], chunks[step % 2])(step)

    return pair


@case({"turns": "any", "streams": "any", "auto": "any"}, num_steps=6)
def backwards_of_two_chunks_in_turn():
    return alternating(lambda: Cross(all_to_all_single))


@case({"turns": "any", "streams": "any", "auto": "any"}, num_steps=6)
def backwards_of_two_chunks_in_turn_with_functional_collectives():
    """Their nodes in the graph are C++'s: no user-defined function tells the two backwards apart."""
    return alternating(lambda: Call(functional_all_reduce_with_gradient))


# ---- context, nesting, regions ----

_colour = contextvars.ContextVar("colour", default="none")


@case()
def context_variables():
    c0, c1 = chunk(*crossings()), chunk(*crossings())
    seen = []

    def note(name):
        def hook(*_):
            seen.append((name, _colour.get()))

        return hook

    c0[-1].register_forward_hook(note("forward"))
    c1[0].weight.register_hook(note("backward"))
    pair = pair_of(c0, c1)

    def coloured(step):
        _colour.set(f"step {step}")
        made = pair(step)

        def forward():
            token = _colour.set("inside the forward")
            try:
                return made.forward()
            finally:
                _colour.reset(token)

        return Pair(forward, made.backward, lambda: [made.results(), sorted(seen)])

    return coloured


@case()
def a_weave_inside_the_forward():
    c0, c1, c2 = chunk(*crossings()), chunk(*crossings()), chunk(*crossings(5))

    def pair(step):
        inner, outer = pair_of(c0, c1)(step), pair_of(c0, c2)(step + 50)

        def forward():
            return outer.forward(), tw.weave(inner.forward, inner.backward, strategy="serial")

        return Pair(forward, outer.backward, lambda: [gradients(c0, c1, c2)])

    return pair


@case()
def a_weave_inside_the_backward():
    c0, c1, c2 = chunk(*crossings(5)), chunk(*crossings()), chunk(*crossings())

    def pair(step):
        inner, outer = pair_of(c1, c2)(step), pair_of(c0, c2)(step + 50)
        told = []

        def backward():
            outer.backward()
            told.append(tw.weave(inner.forward, inner.backward, strategy="serial"))

        return Pair(outer.forward, backward, lambda: [told, gradients(c0, c1, c2)])

    return pair


@case()
def communication_regions():
    def exchange(x):
        box = []
        with tw.communication():
            time.sleep(0.002)
            box.append(x.sum().item())
        return x * 0.5 + box[0]

    return pair_of(chunk(Cross(exchange), *crossings(1)), chunk(Cross(exchange), Cross(exchange)))


@case(num_steps=2)
def compiled_blocks():
    def block():
        compiled = torch.compile(chunk(), backend="aot_eager")
        return nn.Sequential(compiled, *crossings(1), torch.compile(chunk(), backend="eager"), *crossings(1))

    return pair_of(block(), block())


@case(num_steps=3)
def compiled_with_functional_collectives():
    def block():
        body = chunk(Call(functional_all_reduce_with_gradient), Call(functional_all_reduce_with_gradient))
        return nn.Sequential(torch.compile(body, backend="aot_eager"), *crossings(1))

    return pair_of(block(), block())


def functional_all_reduce_with_gradient(x):
    y = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    return funcol.reduce_scatter_tensor_autograd(y * 0.5, "sum", 0, dist.group.WORLD)


@case()
def forward_under_no_grad():
    c0, c1 = chunk(*crossings()), chunk(*crossings())

    def pair(step):
        made = pair_of(c0, c1)(step)

        def forward():
            with torch.no_grad():
                return made.forward()

        return Pair(forward, made.backward, made.results)

    return pair


@case()
def forward_under_inference_mode():
    c0, c1 = chunk(*crossings(2, functional_all_reduce)), chunk(*crossings(2, functional_all_reduce))

    def pair(step):
        made = pair_of(c0, c1)(step)

        def forward():
            with torch.inference_mode():
                return [y + 0 for y in made.forward()]

        return Pair(forward, made.backward, made.results)

    return pair


def check_case(name):
    make, ways, num_steps = CASES[name]
    for strategy in STRATEGIES:
        check_pairs(make, strategy, ways[strategy], num_steps)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_serial(pool, name):
    """Catches state of one strand that leaks into the other, is not inherited, or is not as a serial run leaves it."""
    pool.run(check_case, name)


# ---- the same, where `weave` itself is called inside something ----


@contextlib.contextmanager
def _function_mode():
    from torch.overrides import TorchFunctionMode

    class Doubler(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.tanh else result

    with Doubler():
        yield


@contextlib.contextmanager
def _dispatch_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Doubler(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func in (torch.ops.aten.tanh.default, torch.ops.aten.tanh_backward.default) else result

    with Doubler():
        yield


@contextlib.contextmanager
def _saved_hooks():
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x + 1, lambda x: x - 1):
        yield


AROUND = {
    "autocast": _cpu_autocast,
    "autocast without cache": partial(_cpu_autocast, cache_enabled=False),
    "anomaly mode": partial(torch.autograd.set_detect_anomaly, True),
    "function mode": _function_mode,
    "dispatch mode": _dispatch_mode,
    "saved-tensor hooks": _saved_hooks,
    "hooks forbidden": partial(torch.autograd.graph.disable_saved_tensors_hooks, "not here"),
    "device context": partial(torch.device, "cpu"),
    "math attention": _only_math,
    "float64": _float64,
}


def check_around(name):
    context = AROUND[name]

    def block():
        return nn.Sequential(*(Within(chunk(nn.Tanh(), *crossings()), contextlib.nullcontext) for _ in range(2)))

    def make():
        one, other = block(), block()
        if name != "hooks forbidden":
            other = Checkpointed(other, use_reentrant=False, preserve_rng_state=False)
        pair = pair_of(one, other)

        def noting(step):
            made = pair(step)
            told = []

            def backward():
                made.backward()
                told.append(_thread_state())

            return Pair(made.forward, backward, lambda: [made.results(), told])

        return noting

    for strategy in ("turns", "streams"):
        with context():
            check_pairs(make, strategy, "woven")


def _thread_state():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [
        torch.is_autocast_enabled("cpu"),
        str(torch.get_autocast_dtype("cpu")),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        len(_get_current_function_mode_stack()),
        len(_get_current_dispatch_mode_stack()),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        str(torch.get_default_dtype()),
    ]


@pytest.mark.parametrize("name", AROUND)
def test_equal_where_weave_is_called_inside(pool, name):
    """Catches a mode of the calling thread that the worker thread, which runs the backward, does not have."""
    pool.run(check_around, name)


def count_flops():
    from torch.utils.flop_counter import FlopCounterMode

    def make():
        return pair_of(chunk(*crossings()), chunk(*crossings()))

    counts = []
    for run in (
        partial(run_plainly, make, 2),
        partial(run_woven, make, "turns", 2),
        partial(run_woven, make, "streams", 2),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    return counts


def test_a_flop_counter_sees_both_strands(pool):
    """Catches dispatch modes that the worker thread does not inherit: the count was a third (facts.md)."""
    for plain, turns, streams in pool.run(count_flops):
        assert plain > 0
        assert plain == turns == streams


def autocast_cache_survives():
    """Both strands cast one weight; its cast is made once a region in a serial run, and its gradient is one sum."""
    one = chunk(*crossings(4))

    def make():
        return pair_of(one, one)

    with _cpu_autocast():
        expected = run_plainly(make, 2)
        one.zero_grad()
        found, _ = run_woven(make, "turns", 2)
    check_equal(expected, found)
    # the cache was thrown away at the region's end: a later region must not see stale casts of changed weights
    with torch.no_grad():
        one[0].weight.add_(1.0)
    x = inputs(0, 0)
    with _cpu_autocast():
        y = one[0](x)
    check_equal(F.linear(x.bfloat16(), one[0].weight.bfloat16(), one[0].bias.bfloat16()), y)


def test_the_cast_cache_lives_as_long_as_the_region(pool):
    """Catches casts of old weights that outlive the autocast region, or are thrown away in its middle."""
    pool.run(autocast_cache_survives)


def same_pair_four_times_with_all_strategies():
    make = CASES["plain_chunks"][0]
    expected = run_plainly(make, 6)
    torch.manual_seed(7 + dist.get_rank())
    pair = make()
    for step, strategy in enumerate(("auto", "turns", "serial", "streams", "auto", "turns")):
        made = pair(step)
        torch.manual_seed(100 + step)
        output = tw.weave(made.forward, made.backward, strategy=strategy)
        check_equal(expected[step]["output"], [y.detach() for y in output])
        check_equal(expected[step]["results"], [list(made.results()[0]), *made.results()[1:]])


def test_strategies_may_change_from_pair_to_pair(pool):
    """Catches a strategy that leaves the communicators or the records in another state than it found them."""
    pool.run(same_pair_four_times_with_all_strategies)


def subgroups_of_four(strategy):
    """Two by two: rows for one direction, columns for the other, as tensor and expert parallelism do."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]

    def make():
        parts = [Cross(partial(_reduce_on, row)), Cross(partial(_reduce_on, column)), Cross(all_to_all_single)]
        return pair_of(chunk(*parts), chunk(*reversed(parts)))

    check_pairs(make, strategy, "woven")


@pytest.mark.parametrize("strategy", ["turns", "streams"])
def test_rows_and_columns_of_four_ranks(pool4, strategy):
    """Catches orders that fit on each group and not on all of them together."""
    pool4.run(subgroups_of_four, strategy)


def ranks_in_different_groups(strategy):
    """Half of the ranks do more: only they are in the group that is used twice as often."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]

    def make():
        own = [Cross(partial(_reduce_on, mine)) for _ in range(1 if rank < 2 else 3)]
        return pair_of(chunk(*own), chunk(*own))

    check_pairs(make, strategy, "woven")


@pytest.mark.parametrize("strategy", ["turns", "streams"])
def test_groups_that_do_not_meet_need_not_do_the_same(pool4, strategy):
    """Catches an agreement over ranks that no channel connects."""
    pool4.run(ranks_in_different_groups, strategy)
