"""A kind of pair: told apart by what may communicate differently, and by nothing that changes at every step."""

from __future__ import annotations

import functools

import torch
from torch import nn

from torchweave.engine.kinds import Kinds


def nothing():
    return None


def of(kinds, forward, backward=nothing):
    return kinds.name(kinds.fingerprint(forward, backward))


def test_the_same_call_is_the_same_kind():
    """Catches a kind that holds an object's identity which is another one at each step: nothing would ever be woven."""
    kinds, chunk = Kinds(), nn.Linear(2, 2)

    def make():
        x = torch.randn(3, 2)
        y = chunk(torch.randn(5, 2)).sum()
        return lambda: chunk(x), lambda: y.backward()

    first, second = make(), make()
    assert of(kinds, *first) == of(kinds, *second)
    assert hash(of(kinds, *first)) == hash(of(kinds, *second))


def test_other_modules_are_another_kind():
    """Catches one record for two chunks whose forwards communicate differently."""
    kinds, one, other = Kinds(), nn.Linear(2, 2), nn.Linear(2, 2)

    def make(chunk):
        return lambda: chunk(torch.ones(2))

    assert of(kinds, make(one)) == of(kinds, make(one))
    assert of(kinds, make(one)) != of(kinds, make(other))


def test_train_and_eval_are_two_kinds():
    """Catches a record of training that is followed in evaluation, where modules communicate otherwise."""
    kinds, chunk = Kinds(), nn.Linear(2, 2)
    before = of(kinds, lambda: chunk(1))

    def again():
        return of(kinds, forward)

    def forward():
        return chunk(1)

    training = again()
    chunk.eval()
    assert again() != training
    chunk.train()
    assert again() == training
    assert before is not None


class Send(torch.autograd.Function):
    """Stands for a function that communicates in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def make_backward(num_sends, num_experts=1):
    y = torch.ones(2, requires_grad=True)
    for _ in range(num_sends):
        y = Send.apply(y)
    for _ in range(num_experts):
        y = y.exp()
    loss = y.sum()
    return lambda: loss.backward()


def test_functions_that_communicate_tell_backwards_apart():
    """Catches `lambda: loss.backward()` of two chunks that communicate differently."""
    kinds = Kinds()
    kinds.learn([type(Send.apply(torch.ones(1, requires_grad=True)).grad_fn)])
    assert of(kinds, nothing, make_backward(2)) == of(kinds, nothing, make_backward(2))
    assert of(kinds, nothing, make_backward(2)) != of(kinds, nothing, make_backward(3))


def test_an_expert_without_tokens_is_no_other_kind():
    """Catches a kind that depends on data: on one rank it would be new, and the others would weave."""
    kinds = Kinds()
    assert of(kinds, nothing, make_backward(2, num_experts=1)) == of(kinds, nothing, make_backward(2, num_experts=4))


def test_nodes_of_torch_s_own_are_not_learnt():
    """Catches operators of torch that a hook made communicate: their number depends on data."""
    kinds = Kinds()
    kinds.learn([type(torch.ones(1, requires_grad=True).exp().grad_fn)])
    assert of(kinds, nothing, make_backward(2, num_experts=1)) == of(kinds, nothing, make_backward(2, num_experts=4))


def test_shapes_and_step_counters_are_no_part_of_a_kind():
    """Catches a new kind at each step because routing changes shapes, or a closure counts."""
    kinds, chunk = Kinds(), nn.Linear(2, 2)

    def make(rows, step):
        x = torch.ones(rows, 2)

        def forward():
            return chunk(x), step

        return forward

    assert of(kinds, make(3, 0)) == of(kinds, make(7, 1))


def test_a_number_is_no_part_of_a_kind():
    """Catches a rank's own number, or a step's: ranks would give one pair different names, and weave it differently."""
    kinds = Kinds()
    chunks = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))]

    def make(i):
        return lambda: chunks[i](torch.ones(2))

    assert of(kinds, make(0)) == of(kinds, make(0))
    assert of(kinds, make(0)) == of(kinds, make(1))
    assert of(kinds, functools.partial(lambda i: chunks[i], 0)) != of(kinds, make(0))


def test_bound_methods_and_partials_are_seen_through():
    """Catches callables that are no plain functions and look alike."""
    kinds = Kinds()

    class Runner:
        def __init__(self, chunk):
            self.chunk = chunk

        def forward(self):
            return self.chunk(torch.ones(2))

        def __call__(self):
            return self.forward()

    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    runner = Runner(one)
    assert of(kinds, Runner(one)) == of(kinds, runner)
    assert of(kinds, Runner(one)) != of(kinds, Runner(other))
    assert of(kinds, functools.partial(one, torch.ones(2))) != of(kinds, functools.partial(other, torch.ones(2)))
    assert of(kinds, Runner(one).forward) != of(kinds, Runner(other).forward)


def test_a_dead_module_gives_its_name_to_nobody():
    """Catches a kind by id(): a new module at an old one's address would follow the old one's record."""
    kinds, seen = Kinds(), set()

    def make(chunk):
        return lambda: chunk(1)

    for _ in range(20):
        kind = of(kinds, make(nn.Linear(2, 2)))
        assert kind not in seen
        seen.add(kind)


def test_deep_graphs_need_no_recursion():
    """Catches a recursion limit on a deep model."""
    assert of(Kinds(), nothing, make_backward(1, num_experts=5000)) is not None


def test_containers_that_hold_themselves_end():
    """Catches an endless walk."""
    kinds, loop = Kinds(), []
    loop.append(loop)
    loop.append({"again": loop})
    assert of(kinds, lambda: loop) is not None
