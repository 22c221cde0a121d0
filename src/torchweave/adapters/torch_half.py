"""IDEA: one action of a pair in `torch.distributed.pipelining`, with the bookkeeping that torch does around it.

Torch's runtime hands a pair to a custom function and then keeps no books for it: who waits for what was sent, which
loss belongs to which microbatch, what the two stages of one rank hand each other, how many backwards a stage has had.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from torchweave.errors import UsageError

FORWARD, BACKWARDS = "F", ("B", "I", "W")


class Half:
    """One action of a pair, a forward or a backward, with the bookkeeping around it.

    Args:
        context: What the schedule tells its custom functions.
        step: The arguments of the schedule's step.
        action: The action.
    """

    def __init__(self, context: Any, step: Mapping[str, Any], action: Any) -> None:
        self.schedule, self.context, self.step, self.action = context.schedule_ref, context, step, action
        self.kind, self.microbatch = action.computation_type.value, action.microbatch_index
        stages = {stage.stage_index: stage for stage in self.schedule._stages}
        self.stage = stages[action.stage_index]
        # a stage's neighbour on the same rank is handed its tensors: the bend of the V
        self.before, self.after = stages.get(action.stage_index - 1), stages.get(action.stage_index + 1)

    def strand(self) -> Callable[[], Any]:
        """Wait for what the action needs from elsewhere, count it, and return what it does itself."""
        self.schedule._assert_unsharded(self.stage)
        _gather(self.stage.submod)
        if self.kind == FORWARD:
            self._receive(self.schedule.fwd_recv_ops, self.stage.is_first or self.before is not None)
            seen, compute = self._forward()
        else:
            if self.kind != "W":
                self._receive(self.schedule.bwd_recv_ops, self.stage.is_last or self.after is not None)
            seen, compute = self._backward()
        return functools.partial(_run, (self.stage.submod, seen), f"PP:{self.action}", compute)

    def hand_over(self, output: Any) -> None:
        """Give the neighbour on this rank what the action computed; `output` is the pair's forward's."""
        if self.kind == FORWARD and self.after is not None:
            self.after.set_local_fwd_input(output, self.microbatch)
        if self.kind in ("B", "I") and self.before is not None:
            self.before.set_local_bwd_input(self.stage.get_local_bwd_output(self.microbatch), self.microbatch)

    def _receive(self, operations: Any, is_local: bool) -> None:
        if is_local:
            return
        key = (self.action.stage_index, self.microbatch)
        if key not in operations:
            raise UsageError(
                "A plan receives what an action needs before that action",
                given=f"{self.action} in a pair, and no receive for it before",
                remedy="load the plan with format='compute_only': torch then adds sends and receives",
            )
        for work in operations.pop(key):
            work.wait()

    def _forward(self) -> tuple[Any, Callable[[], Any]]:
        number, loss_fn = self.microbatch, self.schedule._loss_fn
        arguments = (number, self.context.arg_mbs[number], self.context.kwarg_mbs[number])
        keep_loss = None
        if self.stage.is_last and loss_fn is not None:
            more = (self.step["loss_kwargs"],) if self.step.get("loss_kwargs") else ()
            # not the schedule itself: the engine would take the modules of all its stages for this strand's
            reference = weakref.ref(self.schedule)
            keep_loss = functools.partial(_keep_loss, reference, self.stage, self.context.target_mbs, number, more)
        save = self.step.get("return_outputs", True)
        return loss_fn, functools.partial(_forward, self.stage, arguments, save, keep_loss)

    def _backward(self) -> tuple[Any, Callable[[], Any]]:
        stage, number, counter = self.stage, self.microbatch, self.schedule.backward_counter
        if self.kind in ("B", "W"):
            counter[stage.stage_index] += 1
        last = counter[stage.stage_index] == self.schedule._n_microbatches
        if self.kind == "W":
            return stage.backward_state.get(number), functools.partial(_weight_backward, stage, number, last)
        loss = self.schedule._maybe_get_loss(stage, number)
        outputs = stage.fwd_cache.get(number, ((), ()))[0] if loss is None else loss
        if self.kind == "I":
            return outputs, functools.partial(_input_backward, stage, number, loss)
        return outputs, functools.partial(_full_backward, stage, number, loss, last)


def _gather(module: torch.nn.Module) -> None:
    """Gather what FSDP2 has freed since the plan gathered the stage: whether a pair gathers must not depend on when.

    A stage that frees its parameters after each forward is gathered anew in the next pass, unless a backward has been
    in between: pairs of one kind would communicate differently.
    """
    for handle in [part.unshard(async_op=True) for part in module.modules() if isinstance(part, FSDPModule)]:
        if handle is not None:
            handle.wait()


def _run(seen: Any, name: str, compute: Callable[[], Any]) -> Any:  # noqa: ARG001  `seen` is for the engine
    """Run an action under its name in the profile.

    Args:
        seen: The modules and tensors by which the engine tells one kind of pair from another; it does not look into a
            stage for them.
        name: As the schedule's runtime names an action that stands alone.
        compute: What it does.
    """
    with record_function(name):
        return compute()


# One function for each action: the engine also tells kinds of pairs apart by their code.
def _forward(stage: Any, arguments: Any, save: bool, keep_loss: Callable[[Any], None] | None) -> Any:
    output = stage.forward_one_chunk(*arguments, save_forward_output=save)
    if keep_loss is not None:
        keep_loss(output)
    return output


def _keep_loss(schedule: Any, stage: Any, targets: Any, number: int, more: tuple[Any, ...], output: Any) -> None:
    schedule()._maybe_compute_loss(stage, output, targets, number, *more)


def _full_backward(stage: Any, number: int, loss: Any, last: bool) -> None:
    stage.backward_one_chunk(number, loss=loss, full_backward=True, last_backward=last)


def _input_backward(stage: Any, number: int, loss: Any) -> None:
    stage.backward_one_chunk(number, loss=loss, full_backward=False, last_backward=False)


def _weight_backward(stage: Any, number: int, last: bool) -> None:
    stage.backward_weight_one_chunk(number, last_backward=last)
