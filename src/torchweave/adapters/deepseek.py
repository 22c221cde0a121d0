"""IDEA: the hook that DeepSeek's DualPipe and DualPipeV leave to their users, woven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch

from torchweave.adapters.hook import (
    Strategy,
    as_callable,
    as_sequence,
    backward_strand,
    run_pair,
    wrong_type,
)
from torchweave.engine.choose import check_strategy
from torchweave.errors import UsageError

# The second is how version 1.0.0 of the package `dualpipe` spells it.
HOOK_NAMES = ("overlapped_forward_backward", "overlaped_forward_backward")

Module = TypeVar("Module", bound=torch.nn.Module)


def overlapped_forward_backward(
    module0: torch.nn.Module,
    inputs0: Sequence[torch.Tensor | None],
    criterion0: Callable[..., torch.Tensor] | None,
    labels0: Sequence[torch.Tensor | None] | None,
    module1: torch.nn.Module,  # noqa: ARG001  the hook's form; the backward needs only what module1 put out
    loss1: torch.Tensor | None,
    outputs1: Sequence[torch.Tensor | None] | None,
    output_grads1: Sequence[torch.Tensor | None] | None,
    *,
    strategy: Strategy = "auto",
) -> tuple[list[Any], torch.Tensor | None]:
    """Run the forward of one microbatch and the backward of another, each behind the other's communication.

    Args:
        module0: The chunk that goes forward.
        inputs0: Its positional arguments, tensors of any shape and dtype, or None.
        criterion0: The loss function, called as `criterion0(*outputs0, *labels0)`; None where the chunk is not the
            last.
        labels0: The labels, tensors or None; looked at only with `criterion0`.
        module1: The chunk that goes backward.
        loss1: Its loss, one element: `loss1.backward()`, then `loss1.detach_()`. None where the chunk is not the
            last.
        outputs1: Without `loss1`: the chunk's outputs, tensors or None. Their data may be freed already.
        output_grads1: As many gradients, of their outputs' shapes and dtypes. None is left out, and so is the
            gradient of an output that requires none.
        strategy: As for `weave`.

    Returns:
        The outputs of `module0` as a list, and the loss, or None without `criterion0`. Afterwards `.grad` of the
        inputs with which `module1` was run is there.

    Raises:
        UsageError: An argument has the wrong type or length, or `module0` returned neither a tensor nor a list or
            tuple. Whatever either side raises is raised with its own type.

    Source:
        The example `overlapped_forward_backward` of DeepSeek's DualPipe (examples/example_dualpipe.py), which does
        the two one after the other and asks its users for something better; and dualpipe/dualpipe.py, which calls it.
    """
    chunk = as_callable("module0", module0)
    inputs = as_sequence("inputs0", inputs0)
    criterion = None if criterion0 is None else as_callable("criterion0", criterion0)
    labels = () if criterion is None or labels0 is None else as_sequence("labels0", labels0)

    def forward() -> tuple[list[Any], torch.Tensor | None]:
        outputs = _as_outputs(chunk(*inputs))
        return outputs, None if criterion is None else criterion(*outputs, *labels)

    return run_pair(forward, backward_strand(loss1, outputs1, output_grads1), strategy)


@overload
def overlapped(cls: type[Module]) -> type[Module]: ...
@overload
def overlapped(*, strategy: Strategy = "auto") -> Callable[[type[Module]], type[Module]]: ...
def overlapped(cls: Any = None, *, strategy: Strategy = "auto") -> Any:
    """Give a chunk's class the hook that DualPipe and DualPipeV look for, as a decorator.

    `@overlapped` above the class is enough; `@overlapped(strategy="turns")` also chooses how. DualPipe uses the hook
    where both of a rank's chunks are of the same class, and looks for it on that class: decorate the outermost one,
    not one inside a wrapper.

    Args:
        cls: The class, a subclass of `torch.nn.Module`.
        strategy: As for `weave`.

    Returns:
        The same class, with the class method `overlapped_forward_backward`, also under the older spelling
        `overlaped_forward_backward`.

    Raises:
        UsageError: It is no class of modules, or it defines such a hook itself, or there is no such strategy.
    """
    check_strategy(strategy)
    if cls is None:
        return lambda decorated: _with_hook(decorated, strategy)
    return _with_hook(cls, strategy)


def _with_hook(cls: type[Module], strategy: Strategy) -> type[Module]:
    """Add the hook to a class under both names; see `overlapped`."""
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise wrong_type("cls", "a subclass of torch.nn.Module", cls)
    own = [name for name in HOOK_NAMES if name in vars(cls)]
    if own:
        raise UsageError(
            "A class has one hook",
            given=f"{cls.__name__} defines `{own[0]}` already",
            remedy="remove that method, or the decorator",
        )

    def hook(
        cls: type[Module],  # noqa: ARG001  a class method, because DualPipe calls `type(module0).overlapped_...`
        module0: torch.nn.Module,
        inputs0: Sequence[torch.Tensor | None],
        criterion0: Callable[..., torch.Tensor] | None,
        labels0: Sequence[torch.Tensor | None] | None,
        module1: torch.nn.Module,
        loss1: torch.Tensor | None,
        outputs1: Sequence[torch.Tensor | None] | None,
        output_grads1: Sequence[torch.Tensor | None] | None,
    ) -> tuple[list[Any], torch.Tensor | None]:
        return overlapped_forward_backward(
            module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1, strategy=strategy
        )

    hook.__name__, hook.__doc__ = HOOK_NAMES[0], overlapped_forward_backward.__doc__
    for name in HOOK_NAMES:
        setattr(cls, name, classmethod(hook))
    return cls


def _as_outputs(outputs: object) -> list[Any]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, (list, tuple)):
        return list(outputs)
    raise wrong_type("module0(*inputs0)", "a tensor, or a list or tuple of tensors", outputs)
