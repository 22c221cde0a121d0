"""IDEA: a stage runs microbatches through a module, and keeps of each what its backward needs: a graph, no outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchweave.errors import UsageError, described
from torchweave.pipeline.backward import Gradients, WeightPart, full_backward, input_backward
from torchweave.pipeline.parallel import wrapping_of
from torchweave.pipeline.values import Outputs, TensorLayout, as_arguments, take_apart

_LOG = logging.getLogger("torchweave")

Loss = Callable[..., Tensor]


@dataclass(slots=True)
class Forward:
    """The forward of one microbatch, ready to run.

    Attributes:
        run: Runs it; returns the outputs and, on the last stage, the loss.
        leaves: The inputs for which gradients go back.
    """

    run: Callable[[], tuple[Any, Tensor | None]]
    leaves: list[Tensor]


@dataclass(slots=True)
class _Held:
    """What a microbatch leaves behind between its forward and its weight gradients."""

    leaves: list[Tensor]
    edges: list[GradientEdge]
    layouts: list[TensorLayout]
    part: WeightPart | None = None


class Stage:
    """One stage of the model on this rank.

    Args:
        index: Its number, from the model's first.
        num_stages: Of the whole model.
        module: The chunk that it runs; wrapped in DDP or FSDP2 or not.
    """

    def __init__(self, index: int, num_stages: int, module: nn.Module) -> None:
        self.index, self.module = index, module
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.wrapping = wrapping_of(module)
        # why its weight gradients cannot be apart from its input gradients; "" while they can
        self.reason = self.wrapping.together
        self._said: set[str] = set()
        self._held: dict[int, _Held] = {}

    def forward(self, value: Any, loss_fn: Loss | None, target: Any) -> Forward:
        """Prepare the forward of a microbatch.

        Args:
            value: What comes in: a tensor, or a tuple, list or dict of them; received tensors are leaves.
            loss_fn: On the last stage: `loss_fn(outputs, target)`, or `loss_fn(outputs)` where the target is None.
            target: The microbatch's target.
        """
        leaves: list[Tensor] = []

        def enter(item: Any) -> Any:
            if isinstance(item, Tensor) and item.requires_grad and not self.is_first:
                leaves.append(item)
                return _enter(item)
            return item

        args, kwargs = as_arguments(torch.utils._pytree.tree_map(enter, value))
        return Forward(partial(_run_forward, self.module, args, kwargs, loss_fn, target), leaves)

    def outputs_of(self, output: Any) -> Outputs:
        """Return the outputs of a forward, to pass on.

        A buffer is copied: the forward of the next microbatch may change it before it has left.
        """
        outputs = take_apart(output)
        if len(outputs.with_gradient) == len(outputs.tensors):
            return outputs
        buffers = {buffer.untyped_storage()._cdata for buffer in self.module.buffers()}
        return outputs._replace(
            tensors=tuple(
                tensor.clone() if tensor.untyped_storage()._cdata in buffers else tensor for tensor in outputs.tensors
            )
        )

    def keep(self, microbatch: int, forward: Forward, outputs: Outputs | None, loss: Tensor | None) -> None:
        """Keep what the backward of a microbatch needs: of its outputs, or on the last stage of its loss."""
        if outputs is not None:
            layouts = [layout for layout in outputs.layout.tensors if layout.requires_grad]
            self._held[microbatch] = _Held(forward.leaves, _edges(outputs.with_gradient), layouts)
            return
        assert loss is not None
        if not loss.requires_grad:
            self._say_once(f"the loss of stage {self.index} requires no gradient: nothing is computed backwards")
        self._held[microbatch] = _Held(forward.leaves, _edges([loss]), [])

    def has_graph(self, microbatch: int) -> bool:
        """Return whether anything that a microbatch left here requires a gradient."""
        return bool(self._held[microbatch].edges)

    def gradient_layouts(self, microbatch: int) -> list[TensorLayout]:
        """Return how the gradients look that come back for a microbatch's outputs."""
        return self._held[microbatch].layouts

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, kind: str, last: bool
    ) -> Callable[[], Gradients]:
        """Return the backward of a microbatch, ready to run; it returns the gradients of the inputs with gradient.

        Args:
            microbatch: The microbatch.
            gradients: For each output with gradient, or for the loss.
            kind: `B`, or `I` for the input gradients alone.
            last: Whether it is the last of the step that gives gradients to this stage's weights.
        """
        held = self._held[microbatch]
        some = [(edge, grad) for edge, grad in zip(held.edges, gradients, strict=True) if grad is not None]
        edges, grads = [edge for edge, _ in some], [grad for _, grad in some]
        if kind == "B":
            del self._held[microbatch]
        else:
            held.edges = []
        if kind == "I":
            if not self.reason:
                return partial(self._run_inputs, held, edges, grads)
            self._say_together()
        held.part = WeightPart(self.reason)
        run = partial(_run_backward, self.module, edges, grads, held.leaves)
        return partial(self._run_last, run, ran=bool(edges)) if last and kind == "B" else run

    def weights(self, microbatch: int, *, last: bool) -> None:
        """Compute the weight gradients of a microbatch whose input gradients are there."""
        part = self._held.pop(microbatch).part
        assert part is not None
        if last:
            self._run_last(part.run, ran=not part.is_empty)
        else:
            part.run()

    def reset(self) -> None:
        """Forget every microbatch, after a failure."""
        self._held.clear()

    def _run_last(self, run: Callable[[], Any], *, ran: bool) -> Any:
        if ran:
            self.wrapping.before_last()
        result = run()
        self.wrapping.reduce(ran=ran)
        return result

    def _run_inputs(self, held: _Held, edges: list[GradientEdge], grads: list[Tensor]) -> Gradients:
        if not edges:
            held.part = WeightPart()
            return tuple(None for _ in held.leaves)
        found, held.part = input_backward(edges, grads, held.leaves)
        if held.part.reason:
            self.reason = held.part.reason
            self._say_together()
        return found

    def _say_together(self) -> None:
        """Say that weight gradients fill no bubbles here, and why."""
        self._say_once(f"stage {self.index} computes all gradients at once: {self.reason}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _LOG.warning("%s", text)


class _Enter(torch.autograd.Function):
    """Stands between a received leaf and the module, which may change its input in place: a leaf it may not."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


_enter: Callable[[Tensor], Tensor] = _Enter.apply


def _run_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: Loss | None, target: Any
) -> tuple[Any, Tensor | None]:
    output = module(*args, **kwargs)
    if loss_fn is None:
        return output, None
    loss = loss_fn(output) if target is None else loss_fn(output, target)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise UsageError(
            "loss_fn returns a tensor with one real element",
            given=f"{described(loss)}, complex" if isinstance(loss, Tensor) and loss.is_complex() else described(loss),
            remedy="reduce it, for example by its mean",
        )
    return output, loss


def _run_backward(
    module: nn.Module,  # noqa: ARG001  weave looks for the modules that a callable reaches
    edges: list[GradientEdge],
    gradients: list[Tensor],
    leaves: list[Tensor],
) -> Gradients:
    return full_backward(edges, gradients, leaves) if edges else tuple(None for _ in leaves)


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge]:
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
