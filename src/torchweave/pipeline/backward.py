"""IDEA: input gradients now, weight gradients later, for any eager module, to the bit as one backward has them.

The graph is cut where it leaves the way to the inputs. A matrix product there runs twice, each time for the gradients
of one side alone; what came in is kept in between. Any other node there runs once, and what it gave to the weights'
side is kept: a kernel that computes several gradients together need not compute the same bits for one of them alone
(layer norm), and a user-defined function computes them all anyway, and may communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweave.engine.nodes import leaf_of
from torchweave.pipeline.graph import Graph, children_of, reached

# Their formulas for each input stand alone: tools/autograd/derivatives.yaml.
PRODUCTS = frozenset(
    {
        "AddbmmBackward0",
        "AddmmBackward0",
        "AddmvBackward0",
        "BaddbmmBackward0",
        "BmmBackward0",
        "ConvolutionBackward0",
        "GroupedMmBackward0",
        "MmBackward0",
        "MvBackward0",
    }
)

Gradients = tuple[Tensor | None, ...]
_Kept = tuple[list[GradientEdge], list[Tensor]]


@dataclass(slots=True)
class WeightPart:
    """What is left of a backward whose input gradients are there.

    Attributes:
        reason: Why there is nothing left, because all of it had to run at once; "" where the two parts are apart.
    """

    reason: str = ""
    _products: list[_Product] = field(default_factory=list)
    _kept: _Kept = field(default_factory=lambda: ([], []))
    _weights: list[Tensor] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not (self._products or self._kept[0])

    def run(self) -> None:
        """Add the weight gradients to `.grad`, and let go of the graph."""
        products, (edges, gradients), weights = self._products, self._kept, self._weights
        self._products, self._kept, self._weights = [], ([], []), []
        while products:
            products.pop().run(edges, gradients)
        if edges:
            torch.autograd.backward(edges, gradients, inputs=weights or None)


@dataclass(slots=True)
class _Product:
    """A matrix product that runs again for its weights.

    Attributes:
        own: Weights to which no other operation gives a gradient.
        shared: Where the weights' side begins whose weights get gradients from elsewhere too.
    """

    node: Node
    own: list[Tensor] = field(default_factory=list)
    shared: list[GradientEdge] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def run(self, kept_edges: list[GradientEdge], kept_gradients: list[Tensor]) -> None:
        """Add the gradients of its own weights; those on the way to shared weights join what is kept."""
        if not self.edges:
            return
        if self.shared:
            found = torch.autograd.grad(
                self.edges, self.shared, self.gradients, retain_graph=bool(self.own), allow_unused=True
            )
            _keep(self.shared, found, (kept_edges, kept_gradients))
        if self.own:
            torch.autograd.backward(self.edges, self.gradients, inputs=self.own)


def full_backward(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> Gradients:
    """Run a whole backward.

    Args:
        edges: Where it begins: the outputs' `torch.autograd.graph.get_gradient_edge`. The outputs' data may be gone.
        gradients: For each of them its gradient, of the output's shape and dtype; None for a scalar's 1.
        inputs: Leaves that require a gradient, whose gradients are returned.

    Returns:
        For each input its gradient, or None where nothing depends on it. The weights' are added to `.grad`.
    """
    torch.autograd.backward(tuple(edges), tuple(gradients))
    found = tuple(leaf.grad for leaf in inputs)
    for leaf in inputs:
        leaf.grad = None
    return found


def input_backward(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Gradients, WeightPart]:
    """Compute the inputs' gradients, and keep what the weights' need.

    Where the two cannot be apart, all of the backward runs at once, and the part that is left says why. The saved
    tensors on the way to the inputs stay in memory until the weight gradients have been computed. A hook on the output
    of a matrix product runs once for each part.

    Args:
        edges: Where the backward begins, as for `full_backward`.
        gradients: As for `full_backward`.
        inputs: Leaves that require a gradient, whose gradients are returned; without any, all work is the weights'.

    Returns:
        For each input its gradient, or None where nothing depends on it; and the part that is left.

    Source:
        Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, for the idea of two parts; that nodes run
        in the order of their sequence numbers, so that sums have one order: torch/csrc/autograd/engine.cpp.
    """
    if not inputs:
        part = WeightPart()
        _keep(edges, [_one(edge) if g is None else g for edge, g in zip(edges, gradients, strict=True)], part._kept)
        return (), part
    graph = Graph(edges, inputs)
    cut = _Cut(graph)
    if reason := graph.checkpoint() or cut.obstacle():
        return full_backward(edges, gradients, inputs), WeightPart(reason)
    part = WeightPart(_products=cut.products, _weights=graph.weights)
    begins = []
    for edge, gradient in zip(edges, gradients, strict=True):
        if edge.node in graph.towards:
            begins.append((edge, gradient))
        else:  # what leads to weights alone waits as it is
            _keep([edge], [_one(edge) if gradient is None else gradient], part._kept)
    if not begins:
        return tuple(None for _ in inputs), part
    again = [[GradientEdge(p.node, number) for number in sorted(graph.entries[p.node])] for p in cut.products]
    wanted: list[Any] = [*inputs, *cut.given, *(edge for group in again for edge in group)]
    found = torch.autograd.grad(
        [edge for edge, _ in begins],
        wanted,
        [gradient for _, gradient in begins],
        retain_graph=bool(again),
        allow_unused=True,
    )
    at = len(inputs)
    _keep(cut.given, found[at : at + len(cut.given)], part._kept)
    at += len(cut.given)
    for product, group in zip(cut.products, again, strict=True):
        _keep(group, found[at : at + len(group)], (product.edges, product.gradients))
        at += len(group)
    return tuple(found[: len(inputs)]), part


class _Cut:
    """Where the way to the inputs is left, and what runs there when.

    Attributes:
        given: Where the weights' side begins below nodes that run once.
        products: Nodes that run again, those whose turn is last in a whole backward first.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.given: list[GradientEdge] = []
        self.products: list[_Product] = []
        exits: dict[Node, list[GradientEdge]] = {}
        for node in graph.order:
            if node in graph.towards and (leaving := [e for e in children_of(node) if e.node not in graph.towards]):
                exits[node] = list(dict.fromkeys(leaving))
        # what leads to weights alone and is an output itself begins later, too
        self._waiting = [node for node in graph.roots if node not in graph.towards]
        owners = self._owners(exits)
        self._apart: list[Node] = []
        for node, edges in exits.items():
            product = _Product(node)
            for edge in edges:
                alone = graph.parents[edge.node] == {node} and edge.node not in graph.roots
                if node.name() not in PRODUCTS or not alone:
                    self.given.append(edge)
                    continue
                self._apart.append(edge.node)
                leaves = [leaf for below in reached([edge.node]) if (leaf := leaf_of(below)) is not None]
                if all(owners[id(leaf)] == {node} for leaf in leaves):
                    product.own.extend(leaves)
                else:
                    product.shared.append(edge)
            if product.own or product.shared:
                self.products.append(product)
        self.given = list(dict.fromkeys(self.given))

    def obstacle(self) -> str:
        """Return why the parts cannot be apart, or ""."""
        given = {edge.node for edge in self.given}
        below = [child.node for node in given for child in children_of(node)]
        if given & reached([*self._apart, *below, *self._waiting]):
            return "a weight is shared by a matrix product and an operation of another kind"
        if any(_has_hooks(leaf_of(node)) for node in given):
            return "a weight of an operation that is no matrix product has a hook, which would run twice"
        return ""

    def _owners(self, exits: dict[Node, list[GradientEdge]]) -> dict[int, set[Node]]:
        """Return for each leaf, by its id, the nodes on the way to the inputs, and outputs, that give it a gradient."""
        owners: dict[int, set[Node]] = {}
        starts = [(node, [edge.node for edge in edges]) for node, edges in exits.items()]
        for node, below_node in (*starts, *((node, [node]) for node in self._waiting)):
            for below in reached(below_node):
                if (leaf := leaf_of(below)) is not None:
                    owners.setdefault(id(leaf), set()).add(node)
        return owners


def _keep(edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], kept: _Kept) -> None:
    for edge, gradient in zip(edges, gradients, strict=True):
        if gradient is not None:
            kept[0].append(edge)
            kept[1].append(gradient)


def _has_hooks(leaf: Tensor | None) -> bool:
    return leaf is not None and bool(leaf._backward_hooks)


def _one(edge: GradientEdge) -> Tensor:
    """Return the gradient with which a scalar's backward begins."""
    described = edge.node._input_metadata[edge.output_nr]  # type: ignore[attr-defined]
    return torch.ones(tuple(described.shape), dtype=described.dtype, device=described.device)
