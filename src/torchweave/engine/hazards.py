"""IDEA: what makes a woven run differ from a serial one, looked for while the first pair of a kind runs serially.

Found: a backward that leaves random or numerical state changed; one that changes what the forward's modules hold (an
optimizer inside it, the same batch norm recomputed), at its end or at a crossing; a forward that changes what modules
hold which the backward recomputes, or weights of the backward's graph; gradients that both strands write; DDP and
FSDP2 modules in both strands with their own communication on. For free strands also: a backward that sets the random
state, either strand that sets numerical state. Not found: modules that the forward's callable does not visibly reach.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchweave.engine.holdings import Holdings
from torchweave.engine.reach import reachable
from torchweave.engine.state import Shared

_DEPTH = 6
# a forward on a lane of its own takes new memory: what it keeps, and what it needs for a moment
_LANE_ROOM = 1.5
# functions that set state of the whole process: under free strands the other strand would see it
_RANDOM_SETTERS = ((torch, "set_rng_state"), (torch, "manual_seed"), (torch.cuda, "set_rng_state"))
_SETS_RANDOM = "the backward sets the random state (activation checkpointing does, unless preserve_rng_state=False)"
_SETTERS = (
    (torch, "set_default_dtype"),
    (torch, "set_float32_matmul_precision"),
    (torch._C, "_set_fp32_precision_setter"),
    (torch, "use_deterministic_algorithms"),
    (torch, "set_anomaly_enabled"),
    (torch._C, "_set_sdp_use_flash"),
    (torch._C, "_set_sdp_use_mem_efficient"),
    (torch._C, "_set_sdp_use_math"),
    (torch._C, "_set_sdp_use_cudnn"),
)


class Hazards:
    """Watches the serial run of a pair.

    Args:
        forward: The forward callable; its modules are those whose state the backward must leave alone.
        backward: The backward callable.

    Attributes:
        veto: Why the pair must stay serial, or "".
        streams_veto: Why it must not run with free strands, or "".
        no_room: Why `auto` should leave free strands alone: memory, or "".
        steps_optimizer: Whether an optimizer stepped inside the backward.
        stateful: Modules that remember in which pass they are (FSDP2's): that belongs to a strand.
    """

    def __init__(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> None:
        self.veto = ""
        self.streams_veto = ""
        self.no_room = ""
        found = (item for item in reachable(forward, depth=_DEPTH, attributes=True) if isinstance(item, nn.Module))
        self._modules = tuple(dict.fromkeys(module for item in found for module in item.modules()))
        self._backward = backward
        self._state = Shared.capture()
        self._elsewhere = _random_states_elsewhere()
        self._held = Holdings(self._modules)
        self._recomputed = Holdings()
        self.steps_optimizer = False
        self._written_grads: set[Any] = set()
        self._in_graph: set[int] | None = None
        self.stateful = tuple(module for module in self._modules if module_states(module))
        self._check_wrappers()

    @contextlib.contextmanager
    def watch_backward(self) -> Iterator[None]:
        """Watch while the backward runs."""
        grads = self._grads()
        optimizers = register_optimizer_step_pre_hook(self._optimizer_steps)
        recomputed = register_module_forward_pre_hook(self._recomputes)
        try:
            with (
                self._tripwires(_RANDOM_SETTERS, _SETS_RANDOM),
                self._tripwires(_SETTERS, "the backward sets numerical state of the process"),
            ):
                yield
        finally:
            recomputed.remove()
            optimizers.remove()
        if changes := self._state.changes(Shared.capture()):
            self._forbid(f"the backward changes {', '.join(changes)}, which the forward sees in a serial run")
        self.at_crossing("backward")
        self._written_grads = _differences(grads, self._grads())

    @contextlib.contextmanager
    def watch_forward(self) -> Iterator[None]:
        """Watch while the forward runs."""
        before, grads, weights = Shared.capture(), self._grads(), self._weights_in_graph()
        self._recomputed.note()
        allocated = _allocated_bytes()
        with self._tripwires(_SETTERS, "the forward sets numerical state of the process"):
            yield
        self._look_for_room(_allocated_bytes() - allocated)
        if Shared.capture().settings != before.settings:
            self.streams_veto = self.streams_veto or "the forward sets numerical state of the process"
        self.at_crossing("forward")
        if self._written_grads & _differences(grads, self._grads()):
            self._forbid("both strands write the gradient of one parameter, and the order of its sum would change")
        if _differences(weights, self._weights_in_graph()):
            self._forbid("the forward writes a parameter that is in the backward's graph")

    def _look_for_room(self, kept_bytes: int) -> None:
        """Keep `auto` from a second compute lane, whose memory is its own, where the device is nearly full."""
        if torch.cuda.is_initialized():
            free_bytes, needed = torch.cuda.mem_get_info()[0], round(_LANE_ROOM * kept_bytes)
            if free_bytes < needed:
                room = f"{needed >> 20} MiB of its own, and {free_bytes >> 20} MiB are free"
                self.no_room = f"a second compute lane needs some {room}"

    def at_crossing(self, strand: str) -> None:
        """Look at what a strand has changed where the other would go on, or at its end.

        Args:
            strand: `forward` or `backward`.
        """
        if strand == "backward":
            if changed := self._held.changed():
                self._forbid(f"the backward changes {changed}, which the forward uses")
            if _random_states_elsewhere() != self._elsewhere:
                self._forbid("the backward draws from Python's or numpy's random state, which the forward sees")
        elif changed := self._recomputed.changed():
            self._forbid(f"the forward changes {changed}, which the backward computes with again")

    def _recomputes(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            self._recomputed.add(module)

    def _forbid(self, why: str) -> None:
        self.veto = self.veto or why

    def _grads(self) -> dict[Any, Any]:
        parameters = {id(p): p for module in self._modules for p in module.parameters(recurse=False)}
        return {
            key: (id(parameter.grad), parameter.grad._version)
            for key, parameter in parameters.items()
            if parameter.grad is not None and not parameter.grad.is_inference()
        }

    def _weights_in_graph(self) -> dict[Any, Any]:
        return {
            id(parameter): parameter._version
            for module in self._modules
            for parameter in module.parameters(recurse=False)
            if id(parameter) in (self._in_graph or ()) and not parameter.is_inference()
        }

    def _optimizer_steps(self, optimizer: Any, *_: Any) -> None:
        self.steps_optimizer = True
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        used = {id(parameter) for module in self._modules for parameter in module.parameters(recurse=False)}
        if stepped & used or not used:
            self._forbid(f"the backward steps {type(optimizer).__name__} on parameters that the forward may use")

    @contextlib.contextmanager
    def _tripwires(self, setters: tuple[tuple[Any, str], ...], why: str) -> Iterator[None]:
        originals = [(owner, name, getattr(owner, name)) for owner, name in setters if hasattr(owner, name)]

        def watched(original: Any) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                self.streams_veto = self.streams_veto or why
                return original(*args, **kwargs)

            return call

        for owner, name, original in originals:
            setattr(owner, name, watched(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _check_wrappers(self) -> None:
        """Refuse DDP and FSDP2 modules whose own communication is on in both strands."""
        if self.stateful:
            self.streams_veto = "an FSDP2 module remembers in which pass it is, for both strands together"
        in_graph = self._in_graph = self._parameters_in_backward()
        for module in self._modules:
            if (trouble := _own_communication(module)) and (
                in_graph is None or any(id(parameter) in in_graph for parameter in module.parameters())
            ):
                self._forbid(trouble)

    def _parameters_in_backward(self) -> set[int] | None:
        """Return the ids of the parameters that the backward's graph reaches, or None where no graph is in sight."""
        roots = [
            item.grad_fn
            for item in reachable(self._backward, depth=_DEPTH, attributes=True)
            if isinstance(item, torch.Tensor) and item.grad_fn is not None
        ]
        if not roots:
            return None
        pending, seen, found = list(roots), set(roots), set()
        while pending:
            node = pending.pop()
            if (variable := getattr(node, "variable", None)) is not None:
                found.add(id(variable))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
        return found


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


def _random_states_elsewhere() -> tuple[Any, ...]:
    """Return Python's and, where it is imported, numpy's random state, which are no part of what turns swap."""
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else ()
    return (random.getstate(), *(item.tobytes() if hasattr(item, "tobytes") else item for item in legacy))


def _differences(before: dict[Any, Any], after: dict[Any, Any]) -> set[Any]:
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def _own_communication(module: nn.Module) -> str:
    """Say what a data-parallel wrapper communicates that must not meet itself in the other strand, or return ""."""
    if type(module).__name__ == "DistributedDataParallel" and getattr(module, "require_backward_grad_sync", False):
        return (
            "the same DistributedDataParallel module is in both strands with gradient synchronization on "
            "(put the pair under its no_sync())"
        )
    if hasattr(module, "_get_fsdp_state") and _reshards(module):
        return (
            "the same FSDP2 module is in both strands and reshards "
            "(set reshard_after_forward=False and set_reshard_after_backward(False))"
        )
    return ""


def module_states(module: nn.Module) -> tuple[Any, ...]:
    """Return the objects in which an FSDP2 module keeps `_training_state`: forward, before or after backward.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py; a forward that begins while it says "before backward"
    takes itself for a recomputation, and registers no hooks for its own backward.
    """
    find_state: Any = getattr(module, "_get_fsdp_state", None)
    if find_state is None:
        return ()
    state = find_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return tuple(owner for owner in (state, *groups) if hasattr(owner, "_training_state"))


def _reshards(module: Any) -> bool:
    """Whether an FSDP2 module frees its gathered parameters after forward or backward."""
    group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
    if group is None:
        return False
    return bool(group._reshard_after_forward or group.reshard_after_backward)
