"""IDEA: a backward graph, walked from Python."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node


def walked(roots: Sequence[Node]) -> list[Node]:
    """Return the nodes of a graph, each after all that it leads to.

    Args:
        roots: Where the backward begins.
    """
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in reversed(node.next_functions) if child is not None)
    return order


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf whose gradient a node accumulates, or None."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) else None
