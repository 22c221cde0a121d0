"""IDEA: pairs of one kind meet the same crossings; a kind is known by code, modules and the backward's graph."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from torchweave.engine.reach import reachable

_DEPTH = 3


class Kinds:
    """Names the kind of a pair from its two callables. Names mean something within one process only."""

    def __init__(self) -> None:
        self._tokens: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()

    def of(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> Hashable:
        """Return the kind of a pair.

        It holds the code of both callables, the identity and mode of the modules that they reach, and the types of the
        operations in the autograd graph of the tensors that the backward reaches. Shapes are no part of it: routing
        changes them from pair to pair.

        Args:
            forward: The forward callable.
            backward: The backward callable.
        """
        return (self._parts(forward, with_graph=False), self._parts(backward, with_graph=True))

    def _parts(self, call: Callable[[], Any], *, with_graph: bool) -> tuple[Hashable, ...]:
        parts: list[Hashable] = []
        scalars: list[Hashable] = []
        num_choices = 0
        for item in reachable(call, depth=_DEPTH, attributes=False):
            if isinstance(item, nn.Module):
                parts.append(("module", self._token(item), item.training))
                num_choices += 1
            elif isinstance(item, torch.Tensor):
                if with_graph and item.grad_fn is not None:
                    parts.append(graph_digest(item))
                    num_choices += 1
            elif isinstance(item, types.CodeType):
                parts.append(item)
            else:
                scalars.append(item)
        # a number beside several modules or losses may choose among them (`chunks[i]`); beside one it says nothing,
        # and a step counter must not make every pair a new kind
        return (*parts, *scalars) if num_choices > 1 else tuple(parts)

    def _token(self, module: nn.Module) -> int:
        token = self._tokens.get(module)
        if token is None:
            token = self._tokens[module] = next(self._numbers)
        return token


def graph_digest(tensor: torch.Tensor) -> int:
    """Return a hash over the operations of a tensor's autograd graph, about 0.2 us each."""
    pending = [tensor.grad_fn]
    seen: set[Any] = set()
    found: list[type] = []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.append(type(node))
        pending.extend(following for following, _ in node.next_functions)
    return hash(tuple(found))
