"""IDEA: pairs of one kind meet the same crossings; a kind is known by code, modules and the backward's functions."""

from __future__ import annotations

import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from torchweave.engine.reach import reachable

_DEPTH = 3


class Fingerprint(NamedTuple):
    """What is seen of a pair before it runs.

    Attributes:
        parts: Code objects and modules that the two callables reach.
        nodes: How many nodes of each user-defined autograd function stand in the backward's graph.
    """

    parts: Hashable
    nodes: Counter[type]


class Kinds:
    """Names the kind of a pair from its two callables. Names mean something within one process only.

    The whole graph of a backward is no part of the name: an expert without tokens leaves its nodes out, on some ranks
    and not on others. What counts is how many nodes there are of those functions that were seen to communicate: these
    have to be equal on all ranks anyway. Shapes are no part of it either (routing changes them from pair to pair), nor
    numbers: a rank's own number, or a step's, would give pairs of one kind different names.
    """

    def __init__(self) -> None:
        self._tokens: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._communicating: weakref.WeakSet[type] = weakref.WeakSet()

    def fingerprint(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> Fingerprint:
        """Look at a pair.

        Args:
            forward: The forward callable.
            backward: The backward callable.
        """
        nodes: Counter[type] = Counter()
        parts = (self._parts(forward, None), self._parts(backward, nodes))
        return Fingerprint(parts, nodes)

    def name(self, fingerprint: Fingerprint) -> Hashable:
        """Return the kind of a pair, by what is known to communicate so far."""
        counts = frozenset((node, count) for node, count in fingerprint.nodes.items() if node in self._communicating)
        return (fingerprint.parts, counts)

    def learn(self, nodes: Iterable[type]) -> None:
        """Note which user-defined autograd functions communicate in their backward."""
        self._communicating.update(node for node in nodes if issubclass(node, BackwardCFunction))

    def _parts(self, call: Callable[[], Any], nodes: Counter[type] | None) -> tuple[Hashable, ...]:
        parts: list[Hashable] = []
        for item in reachable(call, depth=_DEPTH, attributes=False):
            if isinstance(item, nn.Module):
                parts.append(("module", self._token(item), item.training))
            elif isinstance(item, types.CodeType):
                parts.append(item)
            elif nodes is not None and item.grad_fn is not None:
                nodes.update(user_functions(item))
        return tuple(parts)

    def _token(self, module: nn.Module) -> int:
        token = self._tokens.get(module)
        if token is None:
            token = self._tokens[module] = next(self._numbers)
        return token


def user_functions(tensor: torch.Tensor) -> Counter[type]:
    """Count the nodes of user-defined functions in a tensor's autograd graph, about 0.2 us a node."""
    pending = [tensor.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return Counter(type(node) for node in seen if isinstance(node, BackwardCFunction))
