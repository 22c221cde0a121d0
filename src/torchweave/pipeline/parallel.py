"""IDEA: a stage wrapped in DDP or FSDP2 accumulates through the step, and reduces once, with its last backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchweave.errors import UsageError

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch was built without it
    FSDPModule = None  # type: ignore[assignment, misc]


class Wrapping:
    """A stage without a data-parallel wrapper.

    Attributes:
        together: Why its weight gradients cannot be computed apart from its input gradients; "" where they can.
        reduces_in_backward: Whether its last backward communicates, so that it is not woven.
        swaps_weights: Whether the module has other parameters while they are gathered.
    """

    together = ""
    swaps_weights = False
    reduces_in_backward = False

    def begin(self) -> None:
        """Before the first forward of a step: accumulate."""

    def before_last(self) -> None:
        """Right before the last backward of a step that gives gradients to weights."""

    def reduce(self, *, ran: bool) -> None:
        """After the last one: see that the gradients are reduced.

        Args:
            ran: Whether `before_last` was followed by a backward that reached the weights.
        """

    def end(self) -> None:
        """At the end of a step, however it ended: leave the module as it was."""


class _Ddp(Wrapping):
    """DDP: its reducer takes part in the last backward alone."""

    reduces_in_backward = True

    def __init__(self, module: DistributedDataParallel) -> None:
        if module.find_unused_parameters or module.static_graph:
            raise UsageError(
                "A stage's DDP finds no unused parameters and has no static graph",
                given=f"find_unused_parameters={module.find_unused_parameters}, static_graph={module.static_graph}",
                remedy="leave both out: a stage's gradients are reduced once a step, all of them",
            )
        self._module = module

    def begin(self) -> None:
        # as in no_sync(), but for both strands of a pair together
        self._module.require_backward_grad_sync = False

    def before_last(self) -> None:
        self._prepare()

    def reduce(self, *, ran: bool) -> None:
        if not ran:  # everything is there already: zeros, so that the reducer sees every weight once
            self._prepare()
            weights = [p for p in self._module.parameters() if p.requires_grad]
            torch.autograd.backward(weights, [torch.zeros_like(p) for p in weights])

    def end(self) -> None:
        self._module.require_backward_grad_sync = True

    def _prepare(self) -> None:
        """Make the reducer ready, as DDP's own forward does.

        Source: torch/nn/parallel/distributed.py, `_pre_forward` and `forward`.
        """
        self._module.reducer.prepare_for_backward([])


class _Fsdp(Wrapping):
    """FSDP2: its weights stay gathered and its gradients unreduced until the stage's last backward is over."""

    together = "FSDP2 gathers gradients at the end of a whole backward"
    swaps_weights = True

    def __init__(self, roots: list[Any]) -> None:
        self._roots = roots

    def begin(self) -> None:
        for root in self._roots:
            self._set(root, last=False)
            if hasattr(root, "set_reshard_after_forward"):
                root.set_reshard_after_forward(False)

    def reduce(self, *, ran: bool) -> None:
        """Reduce what was accumulated, and free the gathered weights.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `_root_post_backward_final_callback`, which does
            this at the end of a backward.
        """
        for root in self._roots:
            self._set(root, last=True)
            state = root._get_fsdp_state()
            for each in state._state_ctx.all_states:
                groups = getattr(each, "_fsdp_param_groups", None)
                if groups is None:
                    groups = [each._fsdp_param_group] if each._fsdp_param_group is not None else []
                for group in groups:
                    group.post_backward()
            state._root_post_backward_final_callback()

    def _set(self, root: Any, *, last: bool) -> None:
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last)
        root.set_requires_gradient_sync(last)


def wrapping_of(module: nn.Module) -> Wrapping:
    """Return how a stage takes part in data parallelism.

    Raises:
        UsageError: A wrapper stands where it cannot be led.
    """
    if isinstance(module, DistributedDataParallel):
        return _Ddp(module)
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise UsageError(
            "DDP wraps a whole stage", given="a stage with DDP inside it", remedy="wrap the stage itself in DDP"
        )
    roots = _fsdp_roots(module)
    return _Fsdp(roots) if roots else Wrapping()


def _fsdp_roots(module: nn.Module) -> list[Any]:
    """Return the outermost FSDP2 modules."""
    if FSDPModule is None:
        return []
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in _fsdp_roots(child)]
