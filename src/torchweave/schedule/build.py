"""IDEA: every schedule by its name, refused with a reason where its numbers cannot be."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from torchweave.errors import UsageError
from torchweave.schedule.action import Action
from torchweave.schedule.counts import check_count
from torchweave.schedule.dualpipe import dualpipe
from torchweave.schedule.dualpipev import dualpipev
from torchweave.schedule.gpipe import gpipe
from torchweave.schedule.interleaved import interleaved
from torchweave.schedule.onef1b import one_f_one_b
from torchweave.schedule.plan import Plan
from torchweave.schedule.zerobubble import zb_h1, zbv

Rows = tuple[tuple[Action, ...], ...]

_MOST = 4_000_000


@dataclass(frozen=True)
class Recipe:
    """How a schedule is made.

    Attributes:
        rows: The builder; from ranks, microbatches and chunks.
        placement: For each direction, for each stage, its rank; from ranks and chunks.
        num_chunks: Stages that a rank has; None where the user says.
        refusal: Why numbers of ranks and microbatches cannot be, as rule and remedy; None if they can.
    """

    rows: Callable[[int, int, int], Rows]
    placement: Callable[[int, int], tuple[tuple[int, ...], ...]]
    num_chunks: int | None
    refusal: Callable[[int, int], tuple[str, str] | None]


def build(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Plan:
    """Build a schedule.

    Args:
        name: gpipe, 1f1b, interleaved, interleaved-pairs, zb-h1, zbv, dualpipev or dualpipe.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of a step, of both directions together.
        num_chunks: Stages on each rank; only the interleaved ones leave a choice (default 2).

    Returns:
        The plan, of computing actions alone.

    Raises:
        UsageError: There is no such schedule, or it cannot be made for these numbers.
    """
    recipe = recipe_of(name)
    check_count("ranks", num_ranks)
    check_count("microbatches", num_microbatches)
    if num_chunks is not None:
        check_count("chunks", num_chunks)
    if recipe.num_chunks is not None and num_chunks not in (None, recipe.num_chunks):
        raise UsageError(
            f"Schedule {name} has {recipe.num_chunks} {'stage' if recipe.num_chunks == 1 else 'stages'} on each rank",
            given=f"{num_chunks} chunks",
            remedy="leave the number of chunks out, or take interleaved",
        )
    if refusal := recipe.refusal(num_ranks, num_microbatches):
        rule, remedy = refusal
        raise UsageError(rule, given=f"{num_ranks} ranks and {num_microbatches} microbatches", remedy=remedy)
    chunks = recipe.num_chunks or num_chunks or 2
    if num_ranks * num_microbatches * chunks > _MOST:
        raise UsageError(
            f"A plan of more than {_MOST:,} forwards does not fit into memory",
            given=f"{num_ranks} ranks, {num_microbatches} microbatches and {chunks} chunks",
            remedy="take fewer microbatches: what follows in the steady state repeats",
        )
    rows = recipe.rows(num_ranks, num_microbatches, chunks)
    return Plan(name, rows, recipe.placement(num_ranks, chunks), num_microbatches)


def names() -> tuple[str, ...]:
    """Return the names of the schedules, the simplest first."""
    return tuple(_recipes())


def recipe_of(name: str) -> Recipe:
    """Return how the schedule of a name is made.

    Raises:
        UsageError: There is none of this name.
    """
    recipes = _recipes()
    if name not in recipes:
        close = difflib.get_close_matches(name.lower(), recipes, n=1)
        raise UsageError(
            f"A schedule is one of {', '.join(recipes)}",
            given=repr(name),
            remedy=f"take {close[0]}" if close else "take one of these",
        )
    return recipes[name]


def _recipes() -> dict[str, Recipe]:
    return {
        "gpipe": Recipe(lambda r, m, _: gpipe(r, m), _loop, 1, _always),
        "1f1b": Recipe(lambda r, m, _: one_f_one_b(r, m), _loop, 1, _always),
        "interleaved": Recipe(interleaved, _loop, None, _even_rounds),
        "interleaved-pairs": Recipe(lambda r, m, c: interleaved(r, m, c, pairs=True), _loop, None, _even_rounds),
        "zb-h1": Recipe(lambda r, m, _: zb_h1(r, m), _loop, 1, _always),
        "zbv": Recipe(lambda r, m, _: zbv(r, m), _v, 2, _always),
        "dualpipev": Recipe(lambda r, m, _: dualpipev(r, m), _v, 2, _enough_for_v),
        "dualpipe": Recipe(lambda r, m, _: dualpipe(r, m), _both_ways, 2, _enough_for_both),
    }


def _loop(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(num_ranks)) * num_chunks,)


def _v(num_ranks: int, _: int) -> tuple[tuple[int, ...], ...]:
    return ((*range(num_ranks), *reversed(range(num_ranks))),)


def _both_ways(num_ranks: int, _: int) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(num_ranks)), tuple(reversed(range(num_ranks))))


def _always(_: int, __: int) -> None:
    return None


def _even_rounds(num_ranks: int, num_microbatches: int) -> tuple[str, str] | None:
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds == 0:
        return None
    return (
        f"Interleaved 1F1B runs its microbatches in equal rounds, here {rounds}",
        f"take {num_microbatches // rounds * rounds} or {-(-num_microbatches // num_ranks) * num_ranks} microbatches",
    )


def _enough_for_v(num_ranks: int, num_microbatches: int) -> tuple[str, str] | None:
    if num_microbatches >= 2 * num_ranks:
        return None
    return "DualPipeV needs at least 2 microbatches for each rank", f"take {2 * num_ranks} microbatches, or zbv"


def _enough_for_both(num_ranks: int, num_microbatches: int) -> tuple[str, str] | None:
    if num_ranks % 2:
        return "DualPipe needs an even number of ranks, which meet in the middle", "take an even number, or dualpipev"
    if num_microbatches % 2 or num_microbatches < 2 * num_ranks:
        return (
            "DualPipe needs an even number of microbatches, half from each end, at least 2 for each rank",
            f"take {max(2 * num_ranks, num_microbatches + num_microbatches % 2)} microbatches",
        )
    return None
