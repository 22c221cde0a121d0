"""IDEA: a pipeline on this rank runs batches: training steps and evaluations, each begun and ended by all ranks."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import torch
from torch import Tensor

from torchweave.errors import UsageError
from torchweave.pipeline.agree import agree_on_run
from torchweave.pipeline.asked import Asked
from torchweave.pipeline.batch import Microbatches
from torchweave.pipeline.faults import Where
from torchweave.pipeline.places import placement_of, plan_of
from torchweave.pipeline.rig import Rig
from torchweave.pipeline.runner import Step, check_finite
from torchweave.pipeline.stage import Loss
from torchweave.schedule.forwards import forwards
from torchweave.schedule.passes import add_reduce_grad, add_send_recv, only_compute, take_pairs_apart
from torchweave.schedule.plan import Plan

# a plan with its transfers, and a short name for its actions
_Planned = tuple[Plan, str]


class Pipeline:
    """A pipeline on this rank; `torchweave.pipeline.build` makes it.

    Attributes:
        stages: The numbers of the stages that this rank has, ascending.
        num_stages: Of the whole model.
    """

    def __init__(self, rig: Rig, schedule: str | Plan, num_chunks: int, *, learns_always: bool) -> None:
        self._rig, self._schedule, self._num_chunks = rig, schedule, num_chunks
        self._learns_always = learns_always
        self._plans: dict[int, _Planned] = {}
        self._forward_plans: dict[int, _Planned] = {}
        self._runs = False
        self.stages = tuple(sorted(rig.stages))
        self.num_stages = len(placement_of(schedule, len(rig.ranks), num_chunks)[0])

    def plan(self, num_microbatches: int) -> Plan:
        """Return the plan that a step with so many microbatches runs, with its transfers.

        Args:
            num_microbatches: Of the whole pipeline, both directions together.

        Raises:
            UsageError: The schedule cannot be made for so many.
        """
        return self._plan(num_microbatches)[0]

    def step(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        num_microbatches: int,
        loss_fn: Loss,
        loss_scale: float = 1.0,
        reduction: Literal["mean", "sum"] = "mean",
        keep_outputs: bool = True,
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        """Run forward and backward of a batch; gradients are added to `.grad`, as `loss.backward()` adds them.

        Every rank of the pipeline calls it, with the same number of microbatches. Several steps before the optimizer's
        accumulate.

        Args:
            inputs: The batch of the first stage: a tensor, or a tuple (positional arguments) or dict (named ones) of
                tensors, cut along the first dimension into equal microbatches; or a list that has one item for each
                microbatch. Ranks without the first stage may pass None. With `dualpipe`, the first half of the
                microbatches enters at the first rank, and the second half at the last one.
            targets: The batch's targets, likewise, where the last stage is.
            num_microbatches: Into how many microbatches, of both directions together.
            loss_fn: Called as `loss_fn(outputs, targets)` on the last stage's outputs, or with the outputs alone
                where there are no targets; returns a tensor with one element.
            loss_scale: Gradients are those of the loss times this: 1 / k where k steps accumulate, or a gradient
                scaler's scale.
            reduction: What the loss of a step is: the `mean` of its microbatches' losses, or their `sum`.
            keep_outputs: False gives no outputs back, and frees them.

        Returns:
            The loss, unscaled, a scalar, float32, on every rank; and the last stage's outputs, one item for each
            microbatch, None for those whose last stage is on another rank (None for all of them where no last stage
            is here).

        Raises:
            UsageError: An argument is not what is allowed.
            PipelineError: A rank failed, this one or another: raised on every rank of the pipeline, which cannot be
                used any more.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "A step computes gradients",
                given="step() under torch.no_grad() or torch.inference_mode()",
                remedy="call it outside of that, or call evaluate()",
            )
        asked = Asked(loss_fn, reduction, loss_scale, keep_outputs, trains=True)
        loss, outputs = self._run(self._plan(num_microbatches), inputs, targets, asked)
        assert loss is not None
        return loss, outputs

    def evaluate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        num_microbatches: int,
        loss_fn: Loss | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        keep_outputs: bool = True,
    ) -> tuple[Tensor | None, tuple[Any, ...] | None]:
        """Run the forward of a batch alone, without gradients.

        Every rank of the pipeline calls it, whatever the schedule. The modules stay in the mode that they are in: call
        their `eval()` first where dropout and batch norm are to behave so.

        Args:
            inputs: As for `step`.
            targets: As for `step`.
            num_microbatches: Into how many microbatches; any number, also where the schedule's steps need more.
            loss_fn: As for `step`; None for the outputs alone.
            reduction: As for `step`.
            keep_outputs: As for `step`.

        Returns:
            The loss, a scalar, float32, on every rank, None without `loss_fn`; and the last stage's outputs, as from
            `step`.

        Raises:
            UsageError: An argument is not what is allowed.
            PipelineError: A rank failed, this one or another: raised on every rank of the pipeline, which cannot be
                used any more.
        """
        asked = Asked(loss_fn, reduction, 1.0, keep_outputs, trains=False)
        with torch.no_grad():
            return self._run(self._forwards(num_microbatches), inputs, targets, asked)

    def _run(
        self, planned: _Planned, inputs: Any, targets: Any, asked: Asked
    ) -> tuple[Tensor | None, tuple[Any, ...] | None]:
        """Run a plan."""
        rig, (plan, digest) = self._rig, planned
        rig.guard.check()
        if self._runs:
            raise UsageError(
                "A pipeline runs one step at a time",
                given="a step inside another one, or on another thread",
                remedy="build a second pipeline",
            )
        self._runs = True
        try:
            with rig.guard.at(self._here("the beginning of the step")):
                pieces = Microbatches("inputs", inputs, plan.num_microbatches)
                labels = Microbatches("targets", targets, plan.num_microbatches)
                signature = agree_on_run(rig, plan, digest, pieces, asked)
                rig.book.open(signature, learn=self._learns_always)
                if asked.trains:
                    self._begin()
            step = Step(rig, plan, pieces, labels, asked)
            with rig.guard.lookout():
                step.run()
                with rig.guard.at(self._here("the end of the step")):
                    losses = self._losses(step)
            rig.book.close(signature)
        except BaseException:
            self._abandon()
            raise
        finally:
            self._runs = False
            for stage in rig.stages.values():
                stage.wrapping.end()
        outputs = tuple(step.outputs.get(m) for m in range(plan.num_microbatches)) if step.outputs else None
        return asked.reduced(losses), outputs

    def _here(self, action: str) -> Where:
        return Where(self._rig.ranks[self._rig.rank], None, action, None)

    def _begin(self) -> None:
        """Begin a step that computes gradients."""
        stages = self._rig.stages.values()
        swap = any(stage.wrapping.swaps_weights for stage in stages)
        self._rig.sums.begin([] if swap else [stage.module for stage in stages])
        for stage in stages:
            stage.wrapping.begin()

    def _plan(self, num_microbatches: int) -> _Planned:
        if num_microbatches not in self._plans:
            plan = plan_of(self._schedule, len(self._rig.ranks), num_microbatches, self._num_chunks)
            if self._rig.strategy == "serial":  # so that the half that can begin does, and sends its result at once
                plan = take_pairs_apart(plan)
            self._plans[num_microbatches] = _planned(add_reduce_grad(only_compute(plan)))
        return self._plans[num_microbatches]

    def _forwards(self, num_microbatches: int) -> _Planned:
        if num_microbatches not in self._forward_plans:
            placement = placement_of(self._schedule, len(self._rig.ranks), self._num_chunks)
            self._forward_plans[num_microbatches] = _planned(
                forwards(placement, len(self._rig.ranks), num_microbatches)
            )
        return self._forward_plans[num_microbatches]

    def _losses(self, step: Step) -> Tensor:
        """Return every microbatch's loss, on every rank, shape (microbatches), float32."""
        rig, plan = self._rig, step.plan
        losses = torch.zeros(plan.num_microbatches, dtype=torch.float32, device=rig.device)
        for microbatch, loss in step.losses.items():
            losses[microbatch] = loss.reshape(())
        rig.wire.add_up(losses)
        if rig.stops_at_nan and step.asked.trains and rig.device.type != "cpu":
            for microbatch, loss in enumerate(losses.tolist()):
                place = Where(
                    rig.ranks[plan.rank_of(plan.num_stages - 1, microbatch)],
                    plan.num_stages - 1,
                    f"{plan.num_stages - 1}F{microbatch}",
                    microbatch,
                )
                with rig.guard.at(place):
                    check_finite(torch.tensor(loss))
        return losses

    def _abandon(self) -> None:
        """Let go of everything that a failed step holds."""
        self._rig.wire.abandon()
        self._rig.sums.abandon()
        for stage in self._rig.stages.values():
            stage.reset()


def _planned(plan: Plan) -> _Planned:
    """Return a plan with its transfers."""
    plan = add_send_recv(plan)
    text = "\n".join(",".join(map(str, row)) for row in plan.ranks)
    return plan, hashlib.sha256(text.encode()).hexdigest()
