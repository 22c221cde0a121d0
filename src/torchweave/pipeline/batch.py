"""IDEA: a batch becomes microbatches: cut along the first dimension, or handed over as a list that is cut already."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from torchweave.errors import UsageError


class Microbatches:
    """The microbatches of a step, as far as this rank has them.

    Args:
        name: `inputs` or `targets`, for errors.
        value: The whole batch: a tensor, or a tuple or dict with tensors, each cut into equal parts along its first
            dimension; or a list with one item a microbatch, None where this rank does not need it; or None. What is
            no tensor goes to every microbatch as it is.
        count: How many microbatches.

    Raises:
        UsageError: The batch cannot be cut so.
    """

    def __init__(self, name: str, value: Any, count: int) -> None:
        self.name = name
        if isinstance(value, list):
            if len(value) != count:
                raise UsageError(
                    f"A list of {name} has one item for each microbatch",
                    given=f"{len(value)} items, {count} microbatches",
                    remedy=f"give {count} items, or the whole batch as a tensor or tuple",
                )
            self._items = list(value)
        else:
            self._items = [None] * count if value is None else _cut(name, value, count)

    def __getitem__(self, microbatch: int) -> Any:
        item = self._items[microbatch]
        if item is None:
            raise UsageError(
                f"The rank with the {'first' if self.name == 'inputs' else 'last'} stage has its microbatches' "
                f"{self.name}",
                given=f"None for microbatch {microbatch}",
                remedy=f"pass {self.name} to step() on this rank",
            )
        return item

    def get(self, microbatch: int) -> Any:
        """Return a microbatch's item, or None."""
        return self._items[microbatch]


def _cut(name: str, value: Any, count: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if shape and not isinstance(leaf, Tensor):  # else every microbatch would get all of it
            raise UsageError(
                f"What is cut in {name} is a tensor",
                given=f"{type(leaf).__name__} of shape {tuple(shape)}",
                remedy="make it one with torch.as_tensor, or pass a list with one item for each microbatch",
            )
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] % count):
            raise UsageError(
                f"The first dimension of {name} is a multiple of the number of microbatches",
                given=f"a tensor of shape {tuple(leaf.shape)}, {count} microbatches",
                remedy=f"take another batch or number, or cut it yourself and pass a list of {count} microbatches",
            )
    parts = [leaf.tensor_split(count) if isinstance(leaf, Tensor) else (leaf,) * count for leaf in leaves]
    return [pytree.tree_unflatten([part[index] for part in parts], spec) for index in range(count)]


def look_of(value: Any) -> Any:
    """Return how an input looks, for JSON: the shapes of all that is made of it follow from that."""
    leaves, spec = pytree.tree_flatten(value)
    return [
        str(spec),
        [
            [list(leaf.shape), str(leaf.dtype), leaf.requires_grad] if isinstance(leaf, Tensor) else type(leaf).__name__
            for leaf in leaves
        ],
    ]
