"""IDEA: which schedule should I take, and what does weaving buy me: all of them for one model, on one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchweave.errors import UsageError
from torchweave.schedule.build import build, names
from torchweave.schedule.costs import Costs, in_figures
from torchweave.schedule.memory import check_limit
from torchweave.schedule.simulate import simulate

# a step this much longer than the shortest is as good, if the plan needs less memory
_AS_GOOD = 1.01


@dataclass(frozen=True)
class Candidate:
    """What a schedule would give.

    Attributes:
        name: The schedule.
        serial: Step time with each pair as its forward and then its backward.
        woven: Step time with pairs woven; the same where the schedule has no pairs.
        bubble_share: The share of all ranks' time in which they wait, woven.
        activations: The most activations alive on any rank, counted in a rank's share of the model for one microbatch.
        parameter_copies: How often the model's parameters are held.
        has_pairs: Whether it has pairs.
    """

    name: str
    serial: float
    woven: float
    bubble_share: float
    activations: float
    parameter_copies: int
    has_pairs: bool

    @property
    def best(self) -> float:
        """The shorter of the two step times: nobody has to weave."""
        return min(self.serial, self.woven)


@dataclass(frozen=True)
class Comparison:
    """All schedules for one model.

    Attributes:
        num_ranks: Ranks.
        num_microbatches: Microbatches of a step.
        costs: The costs of one rank's share of the model, for one microbatch.
        candidates: Those that can be, the shortest step first.
        refused: Name and reason of those that cannot.
        advice: Which one to take, and why, in one sentence.
    """

    num_ranks: int
    num_microbatches: int
    costs: Costs
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    advice: str


def compare(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    num_chunks: int | None = None,
    max_activations: float | None = None,
) -> Comparison:
    """Simulate every schedule for the same model, ranks and microbatches.

    The costs are those of one rank's share, 1/num_ranks of the model, for one microbatch; a schedule that cuts the
    model into more stages has as much shorter ones.

    Args:
        num_ranks: Ranks.
        num_microbatches: Microbatches of a step.
        costs: Costs of one rank's share; None for F = 1, B = 2, W = 1 and no communication.
        num_chunks: Chunks on each rank for the interleaved schedules; None for 2.
        max_activations: Leave out what holds more activations than this, in shares as above; None for no limit.

    Raises:
        UsageError: The numbers or the limit cannot be, a cost is a list, or no schedule is left.
    """
    check_limit(max_activations)
    costs = costs or Costs()
    found: list[Candidate] = []
    refused: list[tuple[str, str]] = []
    for name in names():
        try:
            candidate = _candidate(name, num_ranks, num_microbatches, costs, num_chunks)
        except _Refused as refusal:
            refused.append((name, str(refusal)))
            continue
        if max_activations is not None and candidate.activations > max_activations:
            refused.append((name, f"holds {candidate.activations:g} activations, more than {max_activations:g}"))
        else:
            found.append(candidate)
    if not found:
        raise UsageError(
            "At least one schedule has to fit the numbers and the limit",
            given="; ".join(f"{name}: {reason}" for name, reason in refused),
            remedy="allow more activations, or other numbers",
        )
    found.sort(key=lambda candidate: (candidate.best, candidate.parameter_copies, candidate.activations))
    return Comparison(num_ranks, num_microbatches, costs, tuple(found), tuple(refused), advice(found))


class _Refused(Exception):  # noqa: N818 (no error: an answer)
    """A schedule cannot be made for these numbers."""


def _candidate(name: str, num_ranks: int, num_microbatches: int, costs: Costs, num_chunks: int | None) -> Candidate:
    chunks = num_chunks if name.startswith("interleaved") else None
    try:
        plan = build(name, num_ranks, num_microbatches, chunks)
    except UsageError as error:
        if num_ranks < 1 or num_microbatches < 1 or (chunks is not None and chunks < 1):
            raise
        raise _Refused(f"{error.rule}; {error.remedy}") from error
    share = num_ranks / plan.num_stages
    woven, serial = (simulate(plan, costs.scaled(share), woven=which) for which in (True, False))
    return Candidate(
        name,
        serial.step_time,
        woven.step_time,
        woven.bubble_share,
        max(woven.peak_activations) * share,
        plan.num_directions,
        any(action.parts for row in plan.ranks for action in row),
    )


def advice(candidates: Sequence[Candidate]) -> str:
    """Say which schedule to take and why, in one sentence.

    Args:
        candidates: At least one, the shortest step first.
    """
    shortest = candidates[0]
    as_good = [candidate for candidate in candidates if candidate.best <= shortest.best * _AS_GOOD]
    chosen = min(as_good, key=lambda candidate: (candidate.parameter_copies, candidate.activations, candidate.best))
    plain = next((candidate for candidate in candidates if candidate.name == "1f1b" and candidate is not chosen), None)
    single = next((candidate for candidate in candidates if candidate.parameter_copies == 1), chosen)
    return f"Take {chosen.name}: {'; '.join([*_reasons(chosen, shortest, plain), *_instead(chosen, single)])}."


def _reasons(chosen: Candidate, shortest: Candidate, plain: Candidate | None) -> Iterator[str]:
    than_plain = f", {1 - chosen.best / plain.best:.0%} shorter than 1f1b's" if plain and plain.best else ""
    if chosen is shortest:
        yield f"its step of {in_figures(chosen.best)} is the shortest{than_plain}"
    else:
        yield f"its step of {in_figures(chosen.best)} is within 1% of {shortest.name}'s in less memory{than_plain}"
    if chosen.has_pairs and chosen.woven < chosen.serial:
        yield f"weaving takes off {1 - chosen.woven / chosen.serial:.0%} of it"
    elif chosen.has_pairs:
        yield "its pairs are best run one after the other, since at these costs weaving gains nothing"
    held = f" (1f1b: {plain.activations:g})" if plain else ""
    yield f"it holds {chosen.activations:g} activations{held} and {_copies(chosen.parameter_copies)} of the parameters"


def _instead(chosen: Candidate, single: Candidate) -> Iterator[str]:
    """Yield what to take by somebody who has no room for the parameters twice."""
    if chosen.parameter_copies > single.parameter_copies:
        longer = f"{single.best / chosen.best - 1:.0%}" if chosen.best else "not"
        yield f"with one copy, take {single.name}, {longer} longer"


def _copies(number: int) -> str:
    return "1 copy" if number == 1 else f"{number} copies"
