"""What would make a woven pair differ from a serial one is seen in the first pair, and the kind stays serial."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import DIM, Cross, Pair, check_pairs, chunk, inputs, pair_of
from operations import all_to_all_single
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

GENERATOR = torch.Generator()


class Checkpointed(nn.Module):
    def __init__(self, module, **options):
        super().__init__()
        self.module, self.options = module, {"use_reentrant": False, **options}

    def forward(self, x):
        return checkpoint(self.module, x, **self.options)


def crossing_chunk():
    return chunk(Cross(all_to_all_single), Cross(all_to_all_single))


class Dispatcher(nn.Module):
    """Keeps what its dispatch computed on an object until its combine, with an all-to-all between."""

    def __init__(self, notes=None):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.notes = notes

    def forward(self, x):
        h = self.linear(x)
        if self.notes is None:
            self.order = h.sum(1).argsort()
            return Cross(all_to_all_single)(h[self.order])[self.order.argsort()] * 2
        self.notes["order"] = h.sum(1).argsort()
        return Cross(all_to_all_single)(h[self.notes["order"]])[self.notes["order"].argsort()] * 2


def notes_on_the_module():
    one = nn.Sequential(nn.Linear(DIM, DIM), Checkpointed(Dispatcher()))
    return pair_of(one, one)


def notes_in_a_shared_dict():
    notes = {}
    return pair_of(Checkpointed(Dispatcher(notes)), Checkpointed(Dispatcher(notes)))


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("bias", torch.zeros(DIM))

    def forward(self, x):
        h = self.linear(x) + self.bias
        self.bias = self.bias * 0.9 + 0.1 * h.detach().mean(0)
        return Cross(all_to_all_single)(h) * (1 + self.bias)


def buffer_bound_anew():
    one = nn.Sequential(Checkpointed(Router()), Checkpointed(Router()))
    return pair_of(one, one)


def data_bound_anew_by_a_hook():
    one = crossing_chunk()

    def step(parameter):
        parameter.data = parameter.data - 0.1 * parameter.grad

    for parameter in one.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return pair_of(one, one)


class Swapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = [module]
        self.own = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(value.detach() + 1) for name, value in module.named_parameters()}
        )

    def forward(self, x):
        weights = {name: self.own[name.replace(".", "_")] for name, _ in self.module[0].named_parameters()}
        return functional_call(self.module[0], weights, (x,))


def weights_swapped_for_a_call():
    one = crossing_chunk()
    return pair_of(Swapped(one), Checkpointed(one, preserve_rng_state=False))


def drawing(draw):
    class Draw(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * draw()

        @staticmethod
        def backward(ctx, grad):
            return grad * draw()

    class Noisy(nn.Module):
        def forward(self, x):
            return Draw.apply(x)

    return pair_of(*(chunk(Noisy(), Cross(all_to_all_single), Noisy(), Cross(all_to_all_single)) for _ in range(2)))


def python_random_in_both():
    random.seed(3)
    return drawing(random.random)


def numpy_random_in_both():
    np.random.seed(3)
    return drawing(lambda: float(np.random.rand()))


def gradients_in_both():
    one = crossing_chunk()
    plain = pair_of(one, one)

    def pair(step):
        made, x = plain(step), inputs(step, 3)

        def forward():
            one[0](x).square().mean().backward()
            return made.forward()

        return Pair(forward, made.backward, made.results)

    return pair


def a_helper_thread():
    def from_a_thread(x):
        y = x.clone()
        helper = threading.Thread(target=lambda: dist.all_reduce(y))
        helper.start()
        helper.join()
        return y * 2

    return pair_of(*(chunk(Cross(from_a_thread), Cross(all_to_all_single)) for _ in range(2)))


def an_optimizer_at_every_second_backward():
    one = crossing_chunk()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    plain = pair_of(one, one)

    def pair(step):
        made = plain(step)

        def backward():
            made.backward()
            if step % 2:
                optimizer.step()

        return Pair(made.forward, backward, made.results)

    return pair


SILENT = [
    notes_on_the_module,
    notes_in_a_shared_dict,
    buffer_bound_anew,
    data_bound_anew_by_a_hook,
    weights_swapped_for_a_call,
    python_random_in_both,
    numpy_random_in_both,
    gradients_in_both,
    a_helper_thread,
]


def check_auto(make):
    check_pairs(make, "auto", "any")


@pytest.mark.parametrize("make", SILENT)
def test_auto_is_equal(pool, make):
    """Catches state that one strand writes and the other reads, which no count of parameters' versions shows."""
    pool.run(check_auto, make)


def refuse_a_new_step():
    from torchweave.errors import NotWeavableError

    pairs = an_optimizer_at_every_second_backward()
    import torchweave as tw

    first, second = pairs(0), pairs(1)
    tw.weave(first.forward, first.backward, kind="steps")
    weights = [parameter.clone() for parameter in second.results()[:0]]
    with pytest.raises(NotWeavableError, match="step an optimizer"):
        tw.weave(second.forward, second.backward, kind="steps")
    return len(weights)


def test_an_optimizer_that_begins_to_step_is_refused_before_it_writes(pool):
    """Catches gradient accumulation, where only some backwards step."""
    pool.run(refuse_a_new_step)


def polite(x):
    y = x.clone()
    work = dist.all_reduce(y, async_op=True)
    time.sleep(polite.pause if dist.get_rank() == 0 else 0)
    # the first pair is the record, and has to have the same waits on both ranks
    if polite.pause == 0 or not work.is_completed():
        work.wait()
    work.wait()
    return y * 2


def waits_that_depend_on_time():
    plain = pair_of(*(chunk(Cross(polite), Cross(polite)) for _ in range(2)))

    def pair(step):
        polite.pause = 0.0 if step == 0 else 0.05
        return plain(step)

    return pair


def check_every_strategy(make):
    for strategy in ("turns", "streams"):
        check_pairs(make, strategy, "woven")


def test_waits_may_be_missing_or_extra(pool):
    """Catches `if not work.is_completed(): work.wait()`, whose waits are another number in every pair."""
    pool.run(check_every_strategy, waits_that_depend_on_time)


def numbers_of_this_rank(step):
    import torchweave as tw

    one, other = crossing_chunk(), crossing_chunk()
    for tokens in (3 + dist.get_rank(), 4 - dist.get_rank(), 5):
        x, loss = inputs(step, tokens), other(inputs(step, 1)).sum()
        expected = one(x)
        got = tw.weave(lambda: (one(x), other, tokens)[0], lambda: loss.backward(), strategy="turns")
        assert torch.equal(expected, got)


def test_a_number_in_the_closure_makes_no_kind(pool):
    """Catches kinds that are new on one rank alone because a number of that rank is in the closure."""
    pool.run(numbers_of_this_rank, 0)


def kinds_that_cross():
    import torchweave as tw
    from torchweave.errors import BrokenGroupError

    one = crossing_chunk()
    pairs = pair_of(one, one)
    for step in range(4):
        tw.weave(pairs(step).forward, pairs(step).backward, kind="ab"[step % 2])
    mine = "ab"[dist.get_rank()]

    def go_on():
        for step in range(4, 8):
            made = pairs(step)
            tw.weave(made.forward, made.backward, kind=mine)

    with pytest.raises(BrokenGroupError, match="the same pair as kind"):
        go_on()


def test_ranks_that_run_one_pair_as_two_kinds_are_stopped(pool):
    """Catches `kind=` that differs between ranks: each is in the proven order of another kind."""
    pool.run(kinds_that_cross)
