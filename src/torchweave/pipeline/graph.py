"""IDEA: a backward graph, looked at from Python: what leads where, which leaves it ends in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from torchweave.engine.later import TELLS_SAVED_HOOKS
from torchweave.engine.nodes import leaf_of, walked


class Graph:
    """The backward graph below some edges.

    Attributes:
        order: Every node, after all that it leads to.
        parents: For each node those that lead to it.
        entries: For each node the numbers of its outputs at which gradients come in.
        roots: Where the backward begins.
        towards: Nodes from which an input is reached.
        weights: The leaves that are no inputs.
    """

    def __init__(self, edges: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self.parents: dict[Node, set[Node]] = {}
        self.entries: dict[Node, set[int]] = {}
        for edge in edges:
            self.entries.setdefault(edge.node, set()).add(edge.output_nr)
            self.parents.setdefault(edge.node, set())
        self.roots = {edge.node for edge in edges}
        self.order = walked([edge.node for edge in edges])
        for node in self.order:
            for edge in children_of(node):
                self.entries.setdefault(edge.node, set()).add(edge.output_nr)
                self.parents.setdefault(edge.node, set()).add(node)
        ends = {get_gradient_edge(leaf).node for leaf in inputs}
        self.towards: set[Node] = set()
        for node in self.order:
            if node in ends or any(edge.node in self.towards for edge in children_of(node)):
                self.towards.add(node)
        self.weights = [leaf for node in self.order if node not in ends and (leaf := leaf_of(node)) is not None]

    def checkpoint(self) -> str:
        """Return why activation checkpointing keeps the parts together, or ""."""
        if not TELLS_SAVED_HOOKS:
            return "this torch does not say where activation checkpointing is"
        for node in self.order:
            if issubclass(getattr(type(node), "_forward_cls", type(None)), CheckpointFunction) or _recomputes(node):
                return "activation checkpointing would run its forward once for each part"
        return ""


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
