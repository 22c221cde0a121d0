"""IDEA: weight gradients later: a backward first starts its next communication, and computes them while that runs.

In a plain backward a matrix product computes two gradients, its input's and its weight's, and only then comes what the
layer below is waiting for. Only the first is on the way to the next communication. So the strand's backward leaves out
the weights of products, keeps what they need (the product's input, and the gradient that came in), and computes them
at the strand's next wait, when the communication has been started; what is left is computed before `backward()`
returns. Every gradient is one product of the same two tensors, by the formula that autograd has, added to `.grad` by
autograd itself: the bits are the same.

What cannot be apart stays where it was: weights that several operations use, weights with hooks, products under
activation checkpointing or other saved-tensor hooks, tensor subclasses, a backward that keeps or makes a graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction

from torchweave.engine.nodes import leaf_of, walked
from torchweave.errors import NotWeavableError

RunBackward: TypeAlias = Callable[..., Any]

# nodes that only look at a weight in another way, or in another precision
_LOOKS = frozenset(
    {
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnsafeViewBackward0",
        "ViewBackward0",
    }
)
# the first forbids a backward for some leaves alone; behind the second stands a hook that may read a weight's gradient
_KEEP_WHOLE = (CheckpointFunction, BackwardHookFunction)
# whether this torch says which saved tensors have hooks, as those under activation checkpointing do
TELLS_SAVED_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


class _Kind(NamedTuple):
    """A kind of matrix product.

    Attributes:
        weight: Which of its inputs is the weight.
        saved: The node's attribute that holds the other factor.
        gradient: From the node, that factor and the gradient that came in to the weight's gradient.
    """

    weight: int
    saved: str
    gradient: Callable[[Node, Tensor, Tensor], Tensor]


def _of_mm(node: Any, factor: Tensor, gradient: Tensor) -> Tensor:
    # a weight that lies the other way round in memory (`linear`'s) gets its gradient in that form
    size, stride = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    if stride[0] == 1 and stride[1] == size[0]:
        return gradient.t().mm(factor).t()
    return factor.t().mm(gradient)


def _of_bmm(_: Any, factor: Tensor, gradient: Tensor) -> Tensor:
    return factor.transpose(1, 2).bmm(gradient)


# Source: tools/autograd/derivatives.yaml (mm, addmm, bmm) and mm_mat2_backward in FunctionsManual.cpp
_PRODUCTS = {
    "MmBackward0": _Kind(1, "_saved_self", _of_mm),
    "AddmmBackward0": _Kind(2, "_saved_mat1", _of_mm),
    "BmmBackward0": _Kind(1, "_saved_self", _of_bmm),
}


class _Product(NamedTuple):
    """A product whose weight's gradient can wait."""

    node: Node
    kind: _Kind
    edge: GradientEdge


class _Piece(NamedTuple):
    """A weight gradient that waits, with what it needs."""

    product: _Product
    factor: Tensor
    gradient: Tensor
    stream: torch.cuda.Stream | None
    versions: tuple[int, int]

    @property
    def storages(self) -> set[int]:
        """Which memory it reads."""
        return {tensor.untyped_storage()._cdata for tensor in (self.factor, self.gradient)}


class Later:
    """The weight gradients that one strand has put off."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._inside = False

    def run_backward(self, plain: RunBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a backward, its weight gradients as late as they can be.

        Args:
            plain: What autograd calls.
            args: Its arguments: where the backward begins, gradients, whether to keep and to make a graph, inputs.
            kwargs: Its other arguments.
        """
        if self._inside or not _may_split(args, kwargs):
            return plain(*args, **kwargs)
        products, leaves = find_products([_node_of(one) for one in args[0]])
        if not products:
            return plain(*args, **kwargs)
        handles = [product.node.register_prehook(functools.partial(self._put_off, product)) for product in products]
        self._inside = True
        try:
            result = plain(*args[:4], tuple(leaves), *args[5:], **kwargs)
        except BaseException:
            self._pieces.clear()
            raise
        finally:
            self._inside = False
            for handle in handles:
                handle.remove()
        self.catch_up()
        return result

    def catch_up(self) -> None:
        """Compute what was put off so far."""
        pieces, self._pieces = self._pieces, []
        pieces.reverse()
        inside, self._inside = self._inside, True
        try:
            while pieces:
                # popped, so that its tensors are free as soon as it is done
                _compute(pieces.pop())
        finally:
            self._inside = inside

    def spare(self, arguments: Any) -> None:
        """Compute at once what would read memory that a collective is about to write.

        Args:
            arguments: The collective's, tensors in lists of lists among them.
        """
        if self._pieces:
            used = {tensor.untyped_storage()._cdata for tensor in tensors_of(arguments)}
            if any(used & piece.storages for piece in self._pieces):
                self.catch_up()

    def _put_off(self, product: _Product, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is None:
            return
        factor: Tensor = getattr(product.node, product.kind.saved)
        stream = torch.cuda.current_stream() if gradient.is_cuda else None
        self._pieces.append(_Piece(product, factor, gradient, stream, (factor._version, gradient._version)))


def tensors_of(argument: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument: a tensor, a list, or a list of lists."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from tensors_of(item)


def _compute(piece: _Piece) -> None:
    if piece.versions != (piece.factor._version, piece.gradient._version):
        raise NotWeavableError(
            "A woven backward must not change a gradient in place which a matrix product still needs",
            given=f"one of shape {tuple(piece.gradient.shape)} was changed by a later operation of the backward",
            remedy="return a new tensor from that operation's backward, as autograd asks for, or use strategy='serial'",
        )
    on_its_stream = contextlib.nullcontext() if piece.stream is None else torch.cuda.stream(piece.stream)
    with on_its_stream:
        with torch.no_grad():
            found = piece.product.kind.gradient(piece.product.node, piece.factor, piece.gradient)
        leaf = leaf_of(piece.product.edge.node)
        if leaf is None:
            torch.autograd.backward((piece.product.edge,), (found,))
            return
        # by way of a view: a first gradient that somebody else holds is copied, one that a view gave is taken over
        with torch.enable_grad():
            view = leaf.view_as(leaf)
        torch.autograd.backward((view,), (found,))


def _may_split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a plain `backward()`: no graph is kept or made, and everything is asked for."""
    if len(args) != 5 or args[2] or args[3] or args[4] or not kwargs.get("accumulate_grad"):
        return False
    return TELLS_SAVED_HOOKS and not torch.is_anomaly_enabled()


def _node_of(root: Any) -> Node | None:
    node: Node | None = root.node if isinstance(root, GradientEdge) else root.grad_fn
    return node


def find_products(roots: Sequence[Node | None]) -> tuple[list[_Product], list[Tensor]]:
    """Return the products whose weights can wait, and the leaves that cannot.

    A product is left alone unless something that cannot wait lies below it too: the engine would not run it otherwise.

    Args:
        roots: Where the backward begins; None for a leaf.
    """
    known = [root for root in roots if root is not None]
    if len(known) < len(roots):
        return [], []
    order = walked(known)
    parents = _counted(order)
    products: list[_Product] = []
    waiting: set[Node] = set()
    # nodes from which a leaf is reached that cannot wait
    needed: set[Node] = set()
    for node in order:
        children = node.next_functions
        if not children:
            if leaf_of(node) is None:
                return [], []  # an end that is no leaf: what it does is not known
            needed.add(node)
            continue
        product = _product_of(node, children, parents)
        if product is not None:
            others = [child for at, (child, _) in enumerate(children) if at != product.kind.weight]
            if any(child in needed for child in others):
                products.append(product)
                waiting.update(_chain(product.edge.node))
        if any(child in needed and child not in waiting for child, _ in children):
            needed.add(node)
        if issubclass(getattr(type(node), "_forward_cls", type(None)), _KEEP_WHOLE):
            return [], []
    leaves = [leaf for node in order if node not in waiting and (leaf := leaf_of(node)) is not None]
    return products, leaves


def _product_of(node: Node, children: tuple[tuple[Node | None, int], ...], parents: dict[Node, int]) -> _Product | None:
    """Return a product whose weight nobody else uses, or None."""
    kind = _PRODUCTS.get(node.name())
    if kind is None or getattr(node, "_saved_alpha", 1) != 1:
        return None
    below, number = children[kind.weight]
    if below is None or getattr(node, f"_raw{kind.saved}").unpack_hook is not None:
        return None
    for one in _chain(below):
        if parents[one] != 1:
            return None
        leaf = leaf_of(one)
        if leaf is None and one.name() not in _LOOKS:
            return None
        if leaf is not None and (type(leaf) not in (Tensor, nn.Parameter) or _has_hooks(leaf) or leaf.is_complex()):
            return None
    return _Product(node, kind, GradientEdge(below, number))


def _chain(node: Node) -> list[Node]:
    """Return a node and what follows it, for as long as there is one way."""
    chain = [node]
    while chain[-1].next_functions and (following := chain[-1].next_functions[0][0]) is not None:
        if chain[-1].name() not in _LOOKS:
            break
        chain.append(following)
    return chain


def _has_hooks(leaf: Tensor) -> bool:
    return bool(leaf._backward_hooks) or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def _counted(order: Sequence[Node]) -> dict[Node, int]:
    """Return how many edges lead to each node."""
    parents = dict.fromkeys(order, 0)
    for node in order:
        for child, _ in node.next_functions:
            if child is not None:
                parents[child] += 1
    return parents
