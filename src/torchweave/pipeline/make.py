"""IDEA: `build` puts a pipeline together from a rank's chunks and a schedule; `Pipeline.step` runs a training step."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchweave.engine.channels import group_timeout_s
from torchweave.engine.choose import check_strategy
from torchweave.errors import UsageError, described
from torchweave.pipeline.batch import Microbatches, look_of
from torchweave.pipeline.book import Book
from torchweave.pipeline.faults import Guard, Where
from torchweave.pipeline.groups import device_of, own_group, own_store
from torchweave.pipeline.p2p import Wire
from torchweave.pipeline.places import placement_of, plan_of, stages_of
from torchweave.pipeline.rig import Rig
from torchweave.pipeline.runner import Step, check_finite
from torchweave.pipeline.share import shared_buckets
from torchweave.pipeline.stage import Loss, Stage
from torchweave.pipeline.sums import Sums
from torchweave.schedule.passes import add_reduce_grad, add_send_recv, only_compute, take_pairs_apart
from torchweave.schedule.plan import Plan

_ALONE_LIMIT_S = 1800.0


class Pipeline:
    """A pipeline on this rank; `build` makes it.

    Attributes:
        stages: The numbers of the stages that this rank has, ascending.
        num_stages: Of the whole model.
    """

    def __init__(self, rig: Rig, schedule: str | Plan, num_chunks: int, *, learns_always: bool) -> None:
        self._rig, self._schedule, self._num_chunks = rig, schedule, num_chunks
        self._learns_always = learns_always
        self._plans: dict[int, tuple[Plan, str]] = {}
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
        rig = self._rig
        rig.guard.check()
        plan, digest = self._plan(num_microbatches)
        if reduction not in ("mean", "sum"):
            raise UsageError("reduction is 'mean' or 'sum'", given=repr(reduction), remedy="leave it out for the mean")
        if not callable(loss_fn):
            raise UsageError("loss_fn can be called", given=described(loss_fn), remedy="pass a function")
        seed = loss_scale / num_microbatches if reduction == "mean" else loss_scale
        here = rig.ranks[rig.rank]
        try:
            with rig.guard.at(Where(here, None, "the beginning of the step", None)):
                pieces = Microbatches("inputs", inputs, num_microbatches)
                labels = Microbatches("targets", targets, num_microbatches)
                step = Step(rig, plan, pieces, labels, loss_fn, seed, keep_outputs)
                signature = self._begin(step, digest)
            with rig.guard.lookout():
                step.run()
                with rig.guard.at(Where(here, None, "the end of the step", None)):
                    losses = self._losses(step)
            rig.book.close(signature)
        except BaseException:
            self._abandon()
            raise
        finally:
            for stage in rig.stages.values():
                stage.wrapping.end()
        outputs = tuple(step.outputs.get(m) for m in range(num_microbatches)) if step.outputs else None
        return (losses.mean() if reduction == "mean" else losses.sum()), outputs

    def _plan(self, num_microbatches: int) -> tuple[Plan, str]:
        if num_microbatches not in self._plans:
            plan = plan_of(self._schedule, len(self._rig.ranks), num_microbatches, self._num_chunks)
            if self._rig.strategy == "serial":  # so that the half that can begin does, and sends its result at once
                plan = take_pairs_apart(plan)
            plan = add_send_recv(add_reduce_grad(only_compute(plan)))
            text = "\n".join(",".join(map(str, row)) for row in plan.ranks)
            self._plans[num_microbatches] = (plan, hashlib.sha256(text.encode()).hexdigest())
        return self._plans[num_microbatches]

    def _begin(self, step: Step, digest: str) -> str:
        """Begin a step on every rank; return what the shapes of its transfers follow from."""
        signature = self._agree(step, digest)
        self._rig.book.open(signature, learn=self._learns_always)
        self._rig.sums.begin()
        for stage in self._rig.stages.values():
            stage.wrapping.begin()
        return signature

    def _agree(self, step: Step, digest: str) -> str:
        """Learn from the ranks with the first stage what comes in, and that they run the same plan."""
        rig, plan = self._rig, step.plan
        said = []
        for direction in range(plan.num_directions):
            begins = [m for m in range(plan.num_microbatches) if plan.direction_of(m) == direction]
            first = plan.rank_of(0, begins[0])
            where = "the beginning of the step"
            if first == rig.rank:
                text = json.dumps([digest, plan.num_microbatches, [look_of(step.inputs[m]) for m in begins]])
                for peer in range(len(rig.ranks)):
                    if peer != rig.rank:
                        rig.wire.send_text(peer, text, Where(rig.ranks[peer], None, where, None))
            else:
                text = rig.wire.receive_text(first, Where(rig.ranks[first], None, where, None))
            theirs, count, _ = json.loads(text)
            if theirs != digest:
                raise UsageError(
                    "Every rank of a pipeline runs the same plan",
                    given=f"another one than on rank {rig.ranks[first]}, which has {count} microbatches where this "
                    f"rank has {plan.num_microbatches}",
                    remedy="pass the same schedule and num_microbatches on every rank",
                )
            said.append(text)
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    def _losses(self, step: Step) -> Tensor:
        """Return every microbatch's loss, on every rank, shape (microbatches), float32."""
        rig, plan = self._rig, step.plan
        losses = torch.zeros(plan.num_microbatches, dtype=torch.float32, device=rig.device)
        for microbatch, loss in step.losses.items():
            losses[microbatch] = loss.reshape(())
        rig.wire.add_up(losses)
        if rig.stops_at_nan and rig.device.type != "cpu":
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


def build(
    model_chunks: Sequence[nn.Module] | nn.Module,
    schedule: str | Plan = "dualpipev",
    group: dist.ProcessGroup | None = None,
    *,
    strategy: str = "auto",
    tied: Mapping[str, nn.Parameter] | None = None,
    limit_s: float | None = None,
    dynamic_shapes: bool = False,
    allow_nonfinite_loss: bool = False,
) -> Pipeline:
    """Put a pipeline together. Every rank of the group calls it.

    Args:
        model_chunks: The stages that this rank has, ascending (`stages_of` says which): any modules, on their device,
            wrapped in DDP or FSDP2 or not. The outputs of one are the next one's arguments: a tensor; a tuple or list
            (by position); a dict (by name).
        schedule: gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev or dualpipe; or a plan of your own.
        group: The pipeline's ranks, in the order of the plan's; None for the default group.
        strategy: By which strategy pairs are woven, as for `weave`; `serial` takes them apart: forward, then backward.
        tied: Weights that stages on several ranks share, by names that are the same there, such as a first stage's
            embedding and a last stage's head. Their gradients are summed. Weights that stages of one rank share need
            no mention, nor do the two replicas of `dualpipe`.
        limit_s: How long anything is waited for, seconds; None for the group's timeout.
        dynamic_shapes: Learn in every step anew how the tensors between the stages look, for models where that
            follows from more than the shapes of the inputs.
        allow_nonfinite_loss: Go on where a microbatch's loss is NaN or infinite.

    Returns:
        The pipeline. The weights of `dualpipe`'s second replica, and tied ones, have been made equal to those of the
        lowest rank that holds them.

    Raises:
        UsageError: An argument is not what is allowed.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    _check_arguments(chunks, strategy, limit_s)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            "group is a process group that this rank is in",
            given=described(group),
            remedy="call build on the pipeline's ranks alone",
        )
    rank, num_ranks = (group.rank(), group.size()) if group is not None else (0, 1)
    mine = stages_of(schedule, rank, num_ranks, num_chunks=len(chunks))
    placement = placement_of(schedule, num_ranks, len(chunks))
    if len(mine) != len(chunks):
        raise UsageError(
            f"Rank {rank} of {num_ranks} has one chunk for each of its stages, {', '.join(map(str, mine))}",
            given=f"{len(chunks)} chunks",
            remedy="pass one module for each; torchweave.pipeline.stages_of says which stages a rank has",
        )
    num_stages = len(placement[0])
    stages = {index: Stage(index, num_stages, chunk) for index, chunk in zip(mine, chunks, strict=True)}
    device = device_of(chunks, group)
    limit_s = limit_s or (group_timeout_s(group) if group is not None else _ALONE_LIMIT_S)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        own = own_group(group, [range(num_ranks)], limit_s) if group is not None else None
        store = own_store(own) if own is not None else None
        guard = Guard(own, store, limit_s, device)
        buckets = shared_buckets(stages, placement, own, guard, dict(tied or {}), limit_s)
    wire = Wire(own, store, guard, device)
    rig = Rig(
        rank,
        tuple(dist.get_process_group_ranks(group)) if group is not None else (guard.rank,),
        stages,
        wire,
        Book(wire),
        guard,
        Sums(buckets),
        device,
        strategy,
        object(),
        not allow_nonfinite_loss,
    )
    return Pipeline(rig, schedule, len(chunks), learns_always=dynamic_shapes)


def _check_arguments(chunks: Sequence[nn.Module], strategy: str, limit_s: float | None) -> None:
    if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise UsageError(
            "model_chunks are modules, one for each stage of this rank",
            given=", ".join(described(chunk) for chunk in chunks) or "none",
            remedy="pass a list of torch.nn.Module",
        )
    check_strategy(strategy)
    if limit_s is not None and not limit_s > 0:
        raise UsageError("limit_s is a time above 0 seconds", given=repr(limit_s), remedy="leave it out")
