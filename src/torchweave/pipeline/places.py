"""IDEA: which stages stand on which rank, and which plan a step runs, follow from the schedule's name."""

from __future__ import annotations

from torchweave.errors import UsageError
from torchweave.schedule import build as schedules
from torchweave.schedule.check import check
from torchweave.schedule.plan import Plan


def stages_of(schedule: str | Plan, rank: int, num_ranks: int, *, num_chunks: int | None = None) -> tuple[int, ...]:
    """Return which stages of the model a rank has, ascending: what `model_chunks` of `build` are.

    Args:
        schedule: As for `build`.
        rank: Within the pipeline.
        num_ranks: Of the pipeline.
        num_chunks: Stages on each rank, for `interleaved` (default 2); the others have a fixed number.

    Raises:
        UsageError: There is no such schedule.
    """
    placement = placement_of(schedule, num_ranks, num_chunks)
    return tuple(sorted({stage for ranks in placement for stage, home in enumerate(ranks) if home == rank}))


def placement_of(schedule: str | Plan, num_ranks: int, num_chunks: int | None) -> tuple[tuple[int, ...], ...]:
    """Return, for each direction, for each stage, its rank.

    Raises:
        UsageError: There is no such schedule, or the plan is for another number of ranks.
    """
    if isinstance(schedule, Plan):
        if schedule.num_ranks != num_ranks:
            raise UsageError(
                "A plan has as many ranks as the group",
                given=f"a plan for {schedule.num_ranks} ranks, a group of {num_ranks}",
                remedy="make the plan for this group",
            )
        return schedule.placement
    recipe = schedules.recipe_of(schedule)
    return recipe.placement(num_ranks, recipe.num_chunks or num_chunks or 2)


def plan_of(schedule: str | Plan, num_ranks: int, num_microbatches: int, num_chunks: int) -> Plan:
    """Return the plan of a schedule, of computing actions alone or as the user made it.

    Raises:
        UsageError: The schedule cannot be made for these numbers.
        PlanError: A plan of the user's own is not valid.
    """
    if not isinstance(schedule, Plan):
        return schedules.build(schedule, num_ranks, num_microbatches, num_chunks)
    if schedule.num_microbatches != num_microbatches:
        raise UsageError(
            "A plan is made for a number of microbatches",
            given=f"{num_microbatches}, where the plan has {schedule.num_microbatches}",
            remedy=f"pass num_microbatches={schedule.num_microbatches}",
        )
    check(schedule)
    return schedule
