"""IDEA: input gradients now, weight gradients later, for any eager module, to the bit as one backward has them.

The graph is cut where it leaves the way to the inputs. A matrix product there runs twice, each time for the gradients
of one side alone; what came in is kept in between. Any other node there runs once, and what it gave to the weights'
side is kept: a kernel that computes several gradients together need not compute the same bits for one of them alone
(layer norm), and a user-defined function computes them all anyway, and may communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

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


class Graph:
    """The backward graph below some edges.

    Attributes:
        order: Every node, after all that it leads to.
        parents: For each node those that lead to it.
        entries: For each node the numbers of its outputs at which gradients come in.
        towards: Nodes from which an input is reached.
        weights: The leaves that are no inputs.
    """

    def __init__(self, edges: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self.order: list[Node] = []
        self.parents: dict[Node, set[Node]] = {}
        self.entries: dict[Node, set[int]] = {}
        for edge in edges:
            self.entries.setdefault(edge.node, set()).add(edge.output_nr)
            self.parents.setdefault(edge.node, set())
        self._walk([edge.node for edge in edges])
        ends = {get_gradient_edge(leaf).node for leaf in inputs}
        self.towards: set[Node] = set()
        for node in self.order:
            if node in ends or any(edge.node in self.towards for edge in children_of(node)):
                self.towards.add(node)
        self.weights = [leaf for node in self.order if node not in ends and (leaf := leaf_of(node)) is not None]

    def checkpoint(self) -> str:
        """Return why activation checkpointing keeps the parts together, or ""."""
        for node in self.order:
            if issubclass(getattr(type(node), "_forward_cls", type(None)), CheckpointFunction) or _recomputes(node):
                return "activation checkpointing would run its forward once for each part"
        return ""

    def _walk(self, roots: Sequence[Node]) -> None:
        """Put the nodes in an order in which each follows all that it leads to."""
        seen: set[Node] = set()
        for root in roots:
            if root in seen:
                continue
            seen.add(root)
            stack = [(root, iter(children_of(root)))]
            while stack:
                node, rest = stack[-1]
                for edge in rest:
                    child = edge.node
                    self.entries.setdefault(child, set()).add(edge.output_nr)
                    self.parents.setdefault(child, set()).add(node)
                    if child not in seen:
                        seen.add(child)
                        stack.append((child, iter(children_of(child))))
                        break
                else:
                    self.order.append(node)
                    stack.pop()


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
        owners = self._owners(exits)
        self._apart: list[Node] = []
        for node, edges in exits.items():
            product = _Product(node)
            for edge in edges:
                if node.name() not in PRODUCTS or graph.parents[edge.node] != {node}:
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
        if given & reached([*self._apart, *below]):
            return "a weight is shared by a matrix product and an operation of another kind"
        if any(_has_hooks(leaf_of(node)) for node in given):
            return "a weight of an operation that is no matrix product has a hook, which would run twice"
        return ""

    @staticmethod
    def _owners(exits: dict[Node, list[GradientEdge]]) -> dict[int, set[Node]]:
        """Return for each leaf, by its id, the nodes on the way to the inputs that give it a gradient."""
        owners: dict[int, set[Node]] = {}
        for node, edges in exits.items():
            for below in reached([edge.node for edge in edges]):
                if (leaf := leaf_of(below)) is not None:
                    owners.setdefault(id(leaf), set()).add(node)
        return owners


def reached(starts: Iterable[Node]) -> set[Node]:
    """Return the nodes that some nodes lead to, and these themselves."""
    seen: set[Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(edge.node for edge in children_of(node))
    return seen


def children_of(node: Node) -> list[GradientEdge]:
    """Return where a node's gradients go."""
    return [GradientEdge(child, number) for child, number in node.next_functions if child is not None]


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf whose gradient a node accumulates, or None."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) else None


def _keep(edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], kept: _Kept) -> None:
    for edge, gradient in zip(edges, gradients, strict=True):
        if gradient is not None:
            kept[0].append(edge)
            kept[1].append(gradient)


def _recomputes(node: Node) -> bool:
    """Whether activation checkpointing without reentrance keeps a node's saved tensors."""
    for name in dir(node):
        if name.startswith("_raw_saved"):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (list, tuple)) else (saved,):
                hook = getattr(one, "unpack_hook", None)
                if hook is not None and "_checkpoint_hook" in getattr(hook, "__qualname__", ""):
                    return True
    return False


def _has_hooks(leaf: Tensor | None) -> bool:
    return leaf is not None and bool(leaf._backward_hooks)


def _one(edge: GradientEdge) -> Tensor:
    """Return the gradient with which a scalar's backward begins."""
    described = edge.node._input_metadata[edge.output_nr]  # type: ignore[attr-defined]
    return torch.ones(tuple(described.shape), dtype=described.dtype, device=described.device)
