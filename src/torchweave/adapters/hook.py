"""IDEA: what every framework's hook shares: a backward strand, checked before anything runs, and how to weave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from torchweave.errors import UsageError, described

Strategy = Literal["auto", "serial", "turns", "streams"]
Result = TypeVar("Result")


def run_pair(forward: Callable[[], Result], backward: Callable[[], Any] | None, strategy: Strategy) -> Result:
    """Weave the two strands and return what the forward strand returned.

    Args:
        forward: The forward strand.
        backward: The backward strand; None where there is nothing to run backward. Such a pair is none: as the first of
            its kind it would say of all others that their backward communicates nothing.
        strategy: As for `weave`.
    """
    if backward is None:
        return forward()
    from torchweave.engine.pair import weave

    result: Result = weave(forward, backward, strategy=strategy)
    return result


def backward_strand(loss1: object, outputs1: object, output_grads1: object) -> Callable[[], None] | None:
    """Return the backward of a hook as a callable, with its arguments checked.

    Args:
        loss1: The loss of the microbatch, one element; or None, and the other two count.
        outputs1: The chunk's outputs, a list or tuple of tensors or None.
        output_grads1: As many gradients, each of its output's shape and dtype, or None.

    Returns:
        With `loss1`: its backward, and then `loss1.detach_()`. Else the backward of `outputs1`; None where no gradient
        is left to run it with.

    Raises:
        UsageError: An argument has the wrong type, or the lengths differ.
    """
    if loss1 is not None:
        if not isinstance(loss1, torch.Tensor):
            raise wrong_type("loss1", "a tensor or None", loss1)
        return lambda: _backward_of_loss(loss1)
    pairs = _pairs(outputs1, output_grads1)
    return (lambda: run_backward(pairs)) if pairs else None


def run_backward(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run backward from several outputs at once, into `.grad` of every leaf.

    Args:
        pairs: Each output with its gradient, at least one. The output's data may be gone already: pipelines free it
            as soon as it has been sent, and keep the tensor for its graph alone.

    Source:
        torch/autograd/graph.py, `_engine_run_backward`: the call below without the check of shapes that
        `torch.autograd.backward` makes first. That check looks at the output's data and so fails once they are freed;
        the engine itself checks each gradient against the shape that the graph has recorded.
    """
    outputs, grads = zip(*pairs, strict=True)
    torch.autograd.Variable._execution_engine.run_backward(
        outputs, grads, keep_graph=False, create_graph=False, allow_unreachable=True, accumulate_grad=True
    )


def as_sequence(name: str, value: object) -> Sequence[Any]:
    """Return a hook's argument if it is a list or tuple.

    Raises:
        UsageError: It is something else. A bare tensor above all: it would be taken apart along its first dimension.
    """
    if not isinstance(value, (list, tuple)):
        raise wrong_type(name, "a list or tuple", value)
    return value


def as_callable(name: str, value: object) -> Callable[..., Any]:
    """Return a hook's argument if it can be called.

    Raises:
        UsageError: It cannot.
    """
    if not callable(value):
        raise wrong_type(name, "callable", value)
    return value


def wrong_type(name: str, allowed: str, value: object) -> UsageError:
    """Return the error for an argument `name` that should have been `allowed`."""
    remedy = f"make `{name}` {allowed}"
    if isinstance(value, torch.Tensor) and "list" in allowed:
        remedy += f"; for one tensor, `[{name}]`"
    return UsageError(f"`{name}` is {allowed}", given=described(value), remedy=remedy)


def _backward_of_loss(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    # the runner keeps the loss for its report; its graph must go now
    loss.detach_()


def _pairs(outputs1: object, output_grads1: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    outputs, grads = as_sequence("outputs1", outputs1), as_sequence("output_grads1", output_grads1)
    if len(outputs) != len(grads):
        raise UsageError(
            "`outputs1` and `output_grads1` are equally long",
            given=f"{len(outputs)} outputs and {len(grads)} gradients",
            remedy="pass one gradient for each output, None where there is none",
        )
    pairs = []
    for index, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
        for name, value in (("outputs1", output), ("output_grads1", grad)):
            if value is not None and not isinstance(value, torch.Tensor):
                raise wrong_type(f"{name}[{index}]", "a tensor or None", value)
        if grad is None:
            continue
        if output is None:
            raise UsageError(
                "A gradient belongs to an output",
                given=f"outputs1[{index}] is None, and output_grads1[{index}] is a tensor",
                remedy="pass None for both, or the output to which the gradient belongs",
            )
        # An output without a graph (a mask that is passed on) has nothing to run backward through.
        if output.requires_grad:
            pairs.append((output, grad))
    return pairs
