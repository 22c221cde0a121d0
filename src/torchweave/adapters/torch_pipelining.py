"""IDEA: the pairs of a schedule of `torch.distributed.pipelining` (its `OVERLAP_F_B` actions), woven.

The schedule's own runtime stays in charge of everything else: sends, receives, gathers and frees of FSDP stages, the
reduction and scaling of gradients. It hands a pair to a custom function and then does no bookkeeping for it; that is
done here, as the runtime does it for a forward and a backward that stand alone.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from torchweave.adapters.hook import Strategy, run_pair
from torchweave.adapters.torch_half import BACKWARDS, FORWARD, Half
from torchweave.engine.choose import check_strategy
from torchweave.errors import UsageError, described

Schedule = TypeVar("Schedule")

# What the bookkeeping leans on, most of it private to torch: a version that lacks one is refused, and not misread.
_LEANS_ON = (
    "_assert_unsharded", "_comp_type_to_function_map", "_loss_fn", "_maybe_compute_loss", "_maybe_get_loss",
    "_n_microbatches", "_stages", "_step_microbatches", "backward_counter", "bwd_recv_ops", "fwd_recv_ops",
    "register_custom_function",
)  # fmt: skip


def weave_schedule(schedule: Schedule, *, strategy: Strategy = "auto") -> Schedule:
    """Make a schedule run the forward and the backward of each of its pairs woven.

    Call it once, after the schedule was made (and its plan was loaded), on every rank.

    Args:
        schedule: A `ScheduleDualPipeV`, or any `_PipelineScheduleRuntime` whose plan has `OVERLAP_F_B` actions.
        strategy: As for `weave`.

    Returns:
        The same schedule.

    Raises:
        UsageError: The schedule has no such actions or no plan yet, its stages are of an unknown kind, it has a
            function for these actions already, there is no such strategy, or torch is too old.

    Source:
        torch/distributed/pipelining/schedules.py, `_PipelineScheduleRuntime._step_microbatches`: what it does around
        `forward_one_chunk` and `backward_one_chunk`, and what it leaves to a function for `OVERLAP_F_B`.
    """
    check_strategy(strategy)
    runtime: Any = schedule
    overlap = _runtime(runtime).OVERLAP_F_B
    _check_plan(runtime, overlap)
    _check_stages(runtime._stages)
    if overlap in runtime._comp_type_to_function_map:
        raise UsageError(
            "A schedule has one function for its pairs",
            given=f"{type(runtime).__name__} has one for OVERLAP_F_B already",
            remedy="call weave_schedule once, and register no function of your own for OVERLAP_F_B",
        )
    pairs = _Pairs(strategy)
    runtime.register_custom_function(overlap, pairs)
    runtime._step_microbatches = pairs.watching(runtime._step_microbatches)
    return schedule


class _Pairs:
    """What a schedule calls for each of its pairs.

    Args:
        strategy: As for `weave`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._step: Mapping[str, Any] = {}

    def watching(self, step_microbatches: Callable[..., None]) -> Callable[..., None]:
        """Return the schedule's own step, with its arguments noted: a custom function is told only some of them."""
        names, original = inspect.signature(step_microbatches), weakref.WeakMethod(step_microbatches)

        def noting(*args: Any, **kwargs: Any) -> None:
            own = original()
            assert own is not None, "whoever calls this has the schedule"
            self._step = names.bind(*args, **kwargs).arguments
            try:
                own(*args, **kwargs)
            finally:
                self._step = {}

        return noting

    def __call__(self, action: Any, context: Any) -> None:
        """Run a pair: woven, or one half after the other where it must not be.

        Args:
            action: The schedule's `OVERLAP_F_B` action.
            context: What the schedule tells its custom functions.
        """
        halves = [Half(context, self._step, part) for part in action.sub_actions]
        if not _may_be_woven(halves):
            for half in halves:
                half.hand_over(half.strand()())
            return
        # Both wait for what other ranks of the pipeline sent before either begins: these ranks run other pairs, so that
        # nothing of theirs may be a part of this one.
        strands = {half.kind == FORWARD: half.strand() for half in halves}
        output = run_pair(strands[True], strands[False], self._strategy)
        for half in halves:
            half.hand_over(output)


def _may_be_woven(halves: Sequence[Half]) -> bool:
    """Whether the actions of a pair are a forward and a backward that know nothing of each other."""
    if sorted(half.kind in BACKWARDS for half in halves) != [False, True]:
        return False
    one, other = halves
    # A stage's last backward, in which DDP and FSDP reduce its gradients, is in no pair: it needs the forwards of all
    # microbatches through all stages, so that no forward is left to run beside it.
    return (one.stage, one.microbatch) != (other.stage, other.microbatch) and one.stage.has_backward


def _runtime(schedule: Any) -> Any:
    """Return torch's module of schedules, if it has what is needed and this is one of its schedules.

    Raises:
        UsageError: torch is too old or has changed, or `schedule` is something else.
    """
    from torch.distributed.pipelining import schedules

    known = getattr(schedules, "_PipelineScheduleRuntime", None)
    lacking = [name for name in ("OVERLAP_F_B", "REDUCE_GRAD") if not hasattr(schedules, name)]
    if known is not None and isinstance(schedule, known):
        lacking += [name for name in _LEANS_ON if not hasattr(schedule, name)]
    if known is None or lacking:
        raise UsageError(
            "weave_schedule needs the schedules of torch 2.10 or newer",
            given=f"torch {torch.__version__}, without {', '.join(lacking) or '_PipelineScheduleRuntime'}",
            remedy="update torch; where it is new already, torchweave does not know this version yet",
        )
    if not isinstance(schedule, known):
        raise UsageError(
            "weave_schedule takes a schedule that runs pairs: ScheduleDualPipeV, or a _PipelineScheduleRuntime",
            given=described(schedule),
            remedy="make a ScheduleDualPipeV, or load a plan with OVERLAP_F_B actions into a _PipelineScheduleRuntime",
        )
    return schedules


def _check_plan(schedule: Any, overlap: Any) -> None:
    # of all ranks: a rank without a pair of its own must not be the only one that raises
    plan = getattr(schedule, "pipeline_order_with_comms", None) or {}
    pairs = [action for row in plan.values() for action in row if action.computation_type == overlap]
    if not pairs:
        found = f"{sum(map(len, plan.values()))} actions, none of them a pair" if plan else "no plan yet"
        raise UsageError(
            "A plan to be woven has OVERLAP_F_B actions",
            given=f"{type(schedule).__name__} with {found}",
            remedy="use ScheduleDualPipeV, or load a plan that has them before weave_schedule",
        )
    for pair in pairs:
        parts = [part.computation_type.value for part in pair.sub_actions or ()]
        if not parts or not {FORWARD, *BACKWARDS}.issuperset(parts):
            raise UsageError(
                "A pair is made of forwards (F) and backwards (B, I, W)", given=str(pair), remedy="mend the plan"
            )


def _check_stages(stages: Any) -> None:
    from torch.distributed.pipelining.stage import _PipelineStageBase

    for stage in stages:
        if not isinstance(stage, _PipelineStageBase):
            raise UsageError(
                "A stage is one of torch.distributed.pipelining's",
                given=described(stage),
                remedy="wrap the module in PipelineStage, or let pipeline(...).build_stage(...) make the stage",
            )
