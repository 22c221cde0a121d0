"""What a callable reaches: the modules and tensors whose state or graph matters, and nothing that costs much."""

from __future__ import annotations

import functools
import time
import types

import torch
from torch import nn

from torchweave.engine.reach import reachable

GLOBAL_CHUNK = nn.Linear(1, 1)


def modules(root, *, depth=6, attributes=True):
    return [item for item in reachable(root, depth=depth, attributes=attributes) if isinstance(item, nn.Module)]


def test_closures_globals_defaults_partials_and_containers():
    """Catches a module that the forward uses and the check for hazards does not see."""
    chunk = nn.Linear(1, 1)

    def closure():
        return chunk

    def by_global():
        return GLOBAL_CHUNK

    def by_default(one=chunk, *, two=GLOBAL_CHUNK):
        return one, two

    boxed = {"a": [(chunk,)]}

    def by_container():
        return boxed

    assert modules(closure) == [chunk]
    assert modules(by_global) == [GLOBAL_CHUNK]
    assert modules(by_default) == [chunk, GLOBAL_CHUNK]
    assert modules(functools.partial(print, chunk, two=GLOBAL_CHUNK)) == [chunk, GLOBAL_CHUNK]
    assert modules(by_container) == [chunk]
    assert modules(chunk) == [chunk]
    assert modules(chunk.forward) == [chunk]


def test_attributes_of_plain_objects():
    """Catches a trainer object whose chunks are its attributes."""
    chunk = nn.Linear(1, 1)
    holder = types.SimpleNamespace(inner=types.SimpleNamespace(chunk=chunk))
    assert modules(lambda: holder) == [chunk]
    assert modules(lambda: holder, attributes=False) == []


def test_tensors_of_bound_builtin_methods():
    """Catches `backward=loss.backward` and functions of tensors."""
    loss = torch.ones(1, requires_grad=True).sum()
    for call in (loss.backward, lambda: loss.backward(), functools.partial(torch.autograd.backward, [loss])):
        assert any(item is loss for item in reachable(call, depth=3, attributes=False))


def test_a_variable_without_a_value_yet():
    """Catches an empty cell that ends the walk with an error."""

    def outer():
        def inner():
            return later

        found = list(reachable(inner, depth=3, attributes=True))
        later = 1
        return found, later

    assert outer()[0]


def test_the_order_is_the_same_at_each_call():
    """Catches a walk over sets or ids: a kind is compared between calls."""
    parts = {f"part {i}": nn.Linear(1, 1) for i in range(20)}

    def forward():
        return parts

    assert modules(forward) == modules(forward) == list(parts.values())


def test_a_long_history_costs_little():
    """Catches a walk over a million losses that a closure happens to hold."""
    history = [float(i) for i in range(1_000_000)]
    begin = time.perf_counter()
    list(reachable(lambda: history, depth=3, attributes=False))
    assert time.perf_counter() - begin < 0.05
