"""What tests of woven pairs share: a pair, the plain run that is the truth, and comparison to the bit."""

from __future__ import annotations

import datetime
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pool import join
from torch import nn

import torchweave as tw
from torchweave.errors import TorchweaveError

DIM = 6


class Pair(NamedTuple):
    """One pair.

    Attributes:
        forward: The forward strand.
        backward: The backward strand.
        results: Returns what else must be equal afterwards: gradients, buffers, lists that the strands filled.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    results: Callable[[], Any]


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, communicate):
        ctx.communicate = communicate
        return communicate(x.detach().contiguous())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.communicate(gradient.detach().contiguous()), None


class Cross(nn.Module):
    """Communicates in its forward, and likewise in its backward."""

    def __init__(self, communicate):
        super().__init__()
        self.communicate = communicate

    def forward(self, x):
        return _Cross.apply(x, self.communicate)


class PlantedError(Exception):
    """An error of the user's own."""


class _Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bomb):
        ctx.bomb = bomb
        if bomb.armed == "forward":
            bomb.go_off()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.bomb.armed == "backward":
            ctx.bomb.go_off()
        return gradient.clone(), None


class Bomb(nn.Module):
    """Does something unexpected in its forward or its backward, once it is armed."""

    def __init__(self):
        super().__init__()
        self.armed, self.go_off = "", lambda: None

    def forward(self, x):
        return _Bomb.apply(x, self)


def planted():
    raise PlantedError("planted here")


def device():
    """Return where the tensors are that the default group sends."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def full(*shape, value=1.0):
    """Return a tensor of one number that the default group can send."""
    return torch.full(shape, value, device=device())


def chunk(*parts):
    """Return a chunk that puts each part between two linear layers."""
    layers = [nn.Linear(DIM, DIM), nn.Tanh()]
    for part in parts:
        layers += [part, nn.Linear(DIM, DIM), nn.Tanh()]
    return nn.Sequential(*layers).to(device())


def inputs(step, salt, rows=4):
    """Return an input that is another one on each rank and at each step."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * salt + dist.get_rank())
    return torch.randn(rows, DIM, generator=generator).to(device()).requires_grad_()


def gradients(*modules):
    """Return every parameter's gradient."""
    return [p.grad for module in modules for p in module.parameters()]


def pair_of(forward_chunk, backward_chunk):
    """Return a maker of pairs for two chunks: a whole forward with its loss, and `loss.backward()`."""

    def pair(step):
        x0, x1 = inputs(step, 0), inputs(step, 1)
        loss = backward_chunk(x1).square().sum()

        def forward():
            y = forward_chunk(x0)
            return y, y.square().mean()

        return Pair(forward, lambda: loss.backward(), lambda: [gradients(forward_chunk, backward_chunk), x1.grad, loss])

    return pair


def chain_of(module):
    """Return a maker of pairs as a pipeline has them: the backward is that of the forward in the pair before."""
    kept = []

    def pair(step):
        x = inputs(step, 0)
        if not kept:
            kept.append(module(inputs(step, 1)).square().sum())
        loss = kept.pop()

        def forward():
            kept.append(module(x).square().sum())
            return kept[0]

        return Pair(forward, lambda: loss.backward(), lambda: [gradients(module), loss])

    return pair


def check_equal(expected, found, path="result"):
    """Raise where two results differ in a single bit, or in kind."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{path}: {type(found).__name__} where a tensor was expected"
        assert expected.dtype == found.dtype, f"{path}: {found.dtype} where {expected.dtype} was expected"
        assert torch.equal(expected, found), f"{path} differs:\n{expected}\n{found}"
    elif isinstance(expected, dict):
        assert list(expected) == list(found), f"{path}: keys {list(found)}, expected {list(expected)}"
        for key in expected:
            check_equal(expected[key], found[key], f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(found), f"{path}: {len(found)} items, expected {len(expected)}"
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            check_equal(one, other, f"{path}[{index}]")
    else:
        assert expected == found, f"{path}: {found!r}, expected {expected!r}"


def copied(value):
    """Return a deep copy of results, apart from every graph."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            value = value.to_local()
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


def run_plainly(make, num_steps):
    """Run pairs as they would run without torchweave: backward, then forward. This is the truth."""
    torch.manual_seed(7 + dist.get_rank())
    pair, told = make(), []
    for step in range(num_steps):
        one = pair(step)
        torch.manual_seed(100 + step)
        one.backward()
        output = one.forward()
        told.append(copied({"output": output, "results": one.results(), "random": torch.get_rng_state()}))
    return told


def run_woven(make, strategy, num_steps, **options):
    """Run the same pairs under `weave`; return results, and how each pair ran: `woven`, `serial` or `refused`."""
    torch.manual_seed(7 + dist.get_rank())
    pair, told, ways = make(), [], []
    for step in range(num_steps):
        one = pair(step)
        torch.manual_seed(100 + step)
        ran_on, backward = [], one.backward

        def watched(ran_on=ran_on, backward=backward):
            ran_on.append(threading.current_thread())
            return backward()

        try:
            output = tw.weave(one.forward, watched, strategy=strategy, **options)
        except TorchweaveError as error:
            ways.append(f"refused: {type(error).__name__}: {error}")
            told.append(None)
            continue
        ways.append("serial" if ran_on == [threading.current_thread()] else "woven")
        told.append(copied({"output": output, "results": one.results(), "random": torch.get_rng_state()}))
    return told, ways


def check_pairs(make, strategy, way, num_steps=3, **options):
    """Raise unless woven pairs equal plain ones to the bit, and ran the way that they should."""
    expected = run_plainly(make, num_steps)
    dist.barrier()
    found, ways = run_woven(make, strategy, num_steps, **options)
    # `auto` begins with what weaves, and then tries the others
    later = "any" if strategy == "auto" and way == "woven" else way
    wanted = ["serial" if way == "woven" else way, way, *[later] * num_steps][:num_steps]
    for step in range(num_steps):
        told = f"pair {step} by {strategy}"
        wanted_here = (wanted[step],) if wanted[step] != "any" else ("woven", "serial")
        assert ways[step].split(":")[0] in wanted_here, f"{told} ran {ways[step]}, expected {wanted_here}"
        if found[step] is not None:
            check_equal(expected[step], found[step], told)


def remake_group(timeout_s, root=None, name="again"):
    """Destroy the default group and make it again, as the remedy of a broken group says."""
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    root = root if root is not None else dist.distributed_c10d._get_default_store()
    # after a failure the ranks come here up to a time limit apart
    root.set(f"{name}, rank {rank}", "is here")
    root.wait([f"{name}, rank {other}" for other in range(size)], datetime.timedelta(seconds=30))
    if backend == "nccl":
        # a broken communicator is not to be waited for
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    join(dist.PrefixStore(name, root), rank, size, timeout_s, backend)


def attempt(call):
    """Return ("ok", result), or the error's type, text and traceback."""
    try:
        return "ok", call(), ""
    except BaseException as error:
        return type(error).__name__, str(error), traceback.format_exc()
