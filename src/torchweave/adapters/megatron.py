"""IDEA: the same hook in the form that a DualPipe on top of Megatron needs, woven. It does not import Megatron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweave.adapters.hook import Strategy, as_callable, as_sequence, backward_strand, run_pair, wrong_type
from torchweave.errors import UsageError


def overlapped_forward_backward(
    module0: torch.nn.Module,
    inputs0: Sequence[torch.Tensor | None],
    labels0: Any,
    loss_masks0: Any,
    loss1: torch.Tensor | None,
    outputs1: Sequence[torch.Tensor | None] | None,
    output_grads1: Sequence[torch.Tensor | None] | None,
    forward_step_func: Callable[..., Any],
    is_last_stage0: bool,
    *,
    strategy: Strategy = "auto",
) -> tuple[Any, torch.Tensor | None]:
    """Run the forward of one microbatch and the backward of another, each behind the other's communication.

    Args:
        module0: The chunk that goes forward. With exactly one input, `set_input_tensor(inputs0)` is called on it, or
            on the first module inside its wrappers (`.module`) that has that method.
        inputs0: Its inputs, tensors of any shape and dtype, or None.
        labels0: The microbatch's labels, handed on at the last stage, unseen.
        loss_masks0: The microbatch's loss masks, handed on at the last stage, unseen.
        loss1: The other microbatch's loss, one element: `loss1.backward()`, then `loss1.detach_()`. None where that
            chunk is not the last.
        outputs1: Without `loss1`: the other chunk's outputs, tensors or None. Their data may be freed already.
        output_grads1: As many gradients, of their outputs' shapes and dtypes. None is left out, and so is the
            gradient of an output that requires none.
        forward_step_func: Called as `forward_step_func(inputs0, module0)`, at the last stage with
            `[*inputs0, labels0, loss_masks0]`; returns the outputs and a loss function.
        is_last_stage0: Whether the loss is to be computed, as `loss_func(outputs0[0])[0]`.
        strategy: As for `weave`.

    Returns:
        The outputs, in a list if it was one tensor, else as they were returned; and the loss, or None where this is
        not the last stage. Afterwards `.grad` of the inputs with which the other chunk was run is there.

    Raises:
        UsageError: An argument has the wrong type or length, no `set_input_tensor` is found, or `forward_step_func`
            did not return outputs and a loss function. Whatever either side raises is raised with its own type.

    Source:
        The question that this project answers (see "The question" in the documentation), which runs the two one after
        the other.
    """
    step = as_callable("forward_step_func", forward_step_func)
    inputs = as_sequence("inputs0", inputs0)
    set_input_tensor = find_set_input_tensor(module0) if len(inputs) == 1 else None
    step_inputs = [*inputs, labels0, loss_masks0] if is_last_stage0 else inputs

    def forward() -> tuple[Any, torch.Tensor | None]:
        if set_input_tensor is not None:
            set_input_tensor(inputs)
        outputs, loss_func = _outputs_and_loss_func(step(step_inputs, module0))
        if not is_last_stage0:
            return outputs, None
        return outputs, as_callable("forward_step_func(...)[1]", loss_func)(outputs[0])[0]

    return run_pair(forward, backward_strand(loss1, outputs1, output_grads1), strategy)


def find_set_input_tensor(module: object) -> Callable[..., Any]:
    """Return the method `set_input_tensor` of a module or of the first module inside its wrappers that has it.

    Args:
        module: The module; each wrapper holds the next one as `.module`, as DistributedDataParallel and Megatron's
            Float16Module do.

    Raises:
        UsageError: None of them has it.
    """
    seen: list[object] = [module]
    while not hasattr(seen[-1], "set_input_tensor"):
        inner = getattr(seen[-1], "module", None)
        if inner is None or any(inner is one for one in seen):
            raise UsageError(
                "With one input, `module0` or a module inside its wrappers has the method `set_input_tensor`",
                given=" around ".join(type(one).__name__ for one in seen),
                remedy="define `set_input_tensor(self, tensors)` on the model, or pass one model of a list of chunks",
            )
        seen.append(inner)
    return as_callable("set_input_tensor", getattr(seen[-1], "set_input_tensor"))  # noqa: B009


def _outputs_and_loss_func(result: object) -> tuple[Any, Any]:
    if not isinstance(result, (list, tuple)) or len(result) != 2:
        raise wrong_type("forward_step_func(...)", "a pair of the outputs and a loss function", result)
    outputs, loss_func = result
    return [outputs] if isinstance(outputs, torch.Tensor) else outputs, loss_func
