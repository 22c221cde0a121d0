"""IDEA: what crosses from one stage to the next, as flat tensors and a layout that says how they belong together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchweave.errors import UsageError, described

_CONSTANTS = (bool, int, float, str, type(None))


class TensorLayout(NamedTuple):
    """How one tensor looks.

    Attributes:
        shape: Its shape.
        dtype: Its dtype's name, such as `float32`.
        requires_grad: Whether a gradient comes back for it.
        stride: Its strides; empty for those of a contiguous tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    stride: tuple[int, ...] = ()

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this layout whose numbers are yet to come."""
        dtype = getattr(torch, self.dtype)
        if self.stride:
            return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)
        return torch.empty(self.shape, dtype=dtype, device=device)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{' with gradient' if self.requires_grad else ''}"


class Layout(NamedTuple):
    """How a stage's outputs look: what has to be the same wherever it is not sent along.

    Attributes:
        structure: Tuples, lists and dicts around the leaves, as text.
        leaves: For each leaf its tensor's layout, or None for a constant.
        constants: The constants, in order.
    """

    structure: str
    leaves: tuple[TensorLayout | None, ...]
    constants: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[TensorLayout, ...]:
        """The layouts of the tensors alone."""
        return tuple(leaf for leaf in self.leaves if leaf is not None)

    def encode(self) -> str:
        """Return the layout as text."""
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str) -> Layout:
        """Read what `encode` gave."""
        structure, leaves, constants = json.loads(text)
        return cls(
            structure,
            tuple(
                None if leaf is None else TensorLayout(tuple(leaf[0]), leaf[1], leaf[2], tuple(leaf[3]))
                for leaf in leaves
            ),
            tuple(constants),
        )

    def is_like(self, other: Layout) -> bool:
        """Return whether what looks so can be sent as what looks like the other: all but the strides is the same."""
        if self == other:
            return True
        mine, theirs = (
            layout._replace(leaves=tuple(leaf and leaf._replace(stride=()) for leaf in layout.leaves))
            for layout in (self, other)
        )
        return mine.encode() == theirs.encode()  # as text: a NaN is no other number than the last one

    def __str__(self) -> str:
        constants = iter(self.constants)
        return ", ".join(repr(next(constants)) if leaf is None else str(leaf) for leaf in self.leaves) or "nothing"


class Outputs(NamedTuple):
    """A stage's outputs, taken apart.

    Attributes:
        layout: How they look.
        tensors: The tensors, in the order of the layout, each with its graph.
    """

    layout: Layout
    tensors: tuple[Tensor, ...]

    @property
    def with_gradient(self) -> tuple[Tensor, ...]:
        """The tensors for which a gradient comes back."""
        return tuple(tensor for tensor in self.tensors if tensor.requires_grad)


def take_apart(value: object) -> Outputs:
    """Take a stage's outputs apart.

    Args:
        value: A tensor, or tuples, lists and dicts of tensors, None, numbers and strings.

    Raises:
        UsageError: Something in it cannot cross to the next stage.
    """
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        _check(leaf)
    try:
        structure = pytree.treespec_dumps(spec)
    except NotImplementedError as error:
        raise UsageError(
            "What crosses between stages is made of tensors, tuples, lists and dicts",
            given=described(value),
            remedy="return a tuple of tensors",
        ) from error
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    layouts = tuple(_layout(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves)
    constants = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
    return Outputs(Layout(structure, layouts, constants), tensors)


def put_together(layout: Layout, tensors: Sequence[Tensor]) -> Any:
    """Return the value that `take_apart` took apart, with these tensors in it."""
    rest, constants = iter(tensors), iter(layout.constants)
    leaves = [next(constants) if leaf is None else next(rest) for leaf in layout.leaves]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(layout.structure))


def as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how a value is given to the next stage: a tuple or list by position, a dict by name, else alone."""
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return (), dict(value)
    return (value,), {}


def _check(leaf: object) -> None:
    if isinstance(leaf, Tensor):
        if hasattr(leaf, "full_tensor"):
            raise UsageError(
                "Plain tensors cross between stages",
                given="a DTensor",
                remedy="let the stage's last module return its local tensor (use_local_output=True), or call "
                "full_tensor() or to_local() at the stage's end",
            )
        if leaf.layout is not torch.strided:
            raise UsageError(
                "Dense tensors cross between stages", given=f"a tensor of layout {leaf.layout}", remedy="make it dense"
            )
    elif not isinstance(leaf, _CONSTANTS):
        raise UsageError(
            "What crosses between stages is made of tensors, None, numbers and strings",
            given=described(leaf),
            remedy="return tensors, in tuples, lists or dicts",
        )


def _layout(tensor: Tensor) -> TensorLayout:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorLayout(tuple(tensor.shape), dtype, tensor.requires_grad, stride_of(tensor))


def stride_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a tensor keeps when it is sent.

    A kernel's numbers may depend on how its inputs lie in memory, so a transposed or channels-last tensor arrives as
    one.

    Args:
        tensor: Any tensor.

    Returns:
        Its strides where it fills its memory without gaps, in another order than a contiguous one; else nothing, which
        stands for contiguous.
    """
    if tensor.is_contiguous():
        return ()
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != filled:
                return ()
            filled *= size
    return tuple(tensor.stride())


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor's numbers, without its graph, in memory in a given order.

    Args:
        tensor: Any tensor.
        stride: What `stride_of` gave for a tensor of this shape.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not stride:
        return tensor.contiguous()
    if stride_of(tensor) == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
