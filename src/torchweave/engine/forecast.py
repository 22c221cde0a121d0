"""IDEA: how long a pair would take in an order of turns, from what its segments take alone; and the best such order.

A model of a device or a core: one lane that computes, one that communicates, each in the order of issue, and a strand
that goes on when its turn has come and what it waits for has ended. The host's own cost of a turn is left out. All
times are whole microseconds, so that every rank finds the same order from the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torchweave.engine.order import REGION, WAIT, Kept, Record

# which strand has each turn, a letter for each segment that it runs: `BFFB` begins with one of the backward's
Order: TypeAlias = str
BACKWARD, FORWARD = "BF"

# so many states are kept where several are no worse than each other, and so many places a search may have
_BEAM, _MOST_PLACES = 8, 10_000
_ELSEWHERE = -1
_END = -2


class Segment(NamedTuple):
    """What a strand does from one wait to the next.

    Attributes:
        issues: Of each operation that it starts: the work before it, and how long the link takes for it, us.
        rest_us: The work after the last of them.
        waits_on: The number of the strand's operation that it then waits for; -1 for something else, -2 at its end.
        away_us: How long something else takes from then on.
        place: Where the wait stands in the strand's record.
    """

    issues: tuple[tuple[int, int], ...]
    rest_us: int
    waits_on: int
    away_us: int = 0
    place: int = -1


class _State(NamedTuple):
    """A pair between two segments.

    Attributes:
        lane: When the computing lane is free.
        link: When the communicating lane is.
        ready: When each strand may go on.
        ends: When the operations end that each strand has started and may still wait for.
    """

    lane: int
    link: int
    ready: tuple[int, int]
    ends: tuple[tuple[int, ...], tuple[int, ...]]

    def flat(self) -> tuple[int, ...]:
        """Return all times: what is nowhere later is no worse."""
        return (self.lane, self.link, *self.ready, *self.ends[0], *self.ends[1])


class _Course:
    """One strand's segments, and which of its operations are still of interest after each."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        # positions among the operations that are known at the end of each segment
        self.awaited: list[int] = []
        self.alive: list[tuple[int, ...]] = []
        known: list[int] = []
        count = 0
        for index, segment in enumerate(segments):
            known.extend(range(count, count + len(segment.issues)))
            count += len(segment.issues)
            self.awaited.append(known.index(segment.waits_on) if segment.waits_on in known else _ELSEWHERE)
            later = {one.waits_on for one in segments[index + 1 :]}
            alive = tuple(at for at, number in enumerate(known) if number in later)
            self.alive.append(alive)
            known = [known[at] for at in alive]


def segments_of(record: Record, times_us: Mapping[str, int], strand: str) -> tuple[Segment, ...]:
    """Cut a strand's record into segments.

    Args:
        record: The strand's steps.
        times_us: `before(strand, step)`, `wire(strand, step)` and `away(strand, step)` of its steps.
        strand: `backward` or `forward`.
    """
    found: list[Segment] = []
    issues: list[tuple[int, int]] = []
    for at, (operation, number) in enumerate(record):
        work = times_us[before(strand, at)]
        if operation not in (WAIT, REGION):
            issues.append((work, times_us[wire(strand, at)]))
            continue
        waits_on = int(number) if operation == WAIT else _ELSEWHERE
        away_us = times_us[away(strand, at)] if waits_on == _ELSEWHERE else 0
        found.append(Segment(tuple(issues), work, waits_on, away_us, at))
        issues = []
    found.append(Segment(tuple(issues), times_us[before(strand, len(record))], _END))
    return tuple(found)


def before(strand: str, step: int) -> str:
    """Name the work before a step of a strand, or after its last one."""
    return f"{strand} {step} before"


def wire(strand: str, step: int) -> str:
    """Name what the link takes for the operation that a step starts."""
    return f"{strand} {step} wire"


def away(strand: str, step: int) -> str:
    """Name how long a wait takes that is for no operation of the strand's."""
    return f"{strand} {step} away"


def alternating(num_backward: int, num_forward: int) -> Order:
    """Return the order in which the turn changes after every segment, for as long as both strands have one."""
    both = min(num_backward, num_forward)
    return (BACKWARD + FORWARD) * both + BACKWARD * (num_backward - both) + FORWARD * (num_forward - both)


def span_us(backward: Sequence[Segment], forward: Sequence[Segment], order: Order) -> int:
    """Return how long a pair takes in an order of turns, us."""
    courses = (_Course(backward), _Course(forward))
    state, at = _State(0, 0, (0, 0), ((), ())), [0, 0]
    for letter in order:
        strand = 0 if letter == BACKWARD else 1
        state = _after(state, courses[strand], strand, at[strand])
        at[strand] += 1
    return state.lane


def bound_us(backward: Sequence[Segment], forward: Sequence[Segment]) -> int:
    """Return the larger of computation and communication alone, us."""
    segments = (*backward, *forward)
    work = sum(one.rest_us + sum(work for work, _ in one.issues) for one in segments)
    return max(work, sum(takes for one in segments for _, takes in one.issues))


def best_order(backward: Sequence[Segment], forward: Sequence[Segment]) -> Order:
    """Return an order of turns in which a pair takes least, the alternating one where none is better.

    Every way to take turns is looked at segment by segment; where two come to the same place, the one that is later
    in everything is given up.

    Args:
        backward: The backward strand's segments; it has the first turn.
        forward: The forward strand's segments.
    """
    courses, sizes = (_Course(backward), _Course(forward)), (len(backward), len(forward))
    plain = alternating(*sizes)
    if (sizes[0] + 1) * (sizes[1] + 1) > _MOST_PLACES:
        return plain
    start = _after(_State(0, 0, (0, 0), ((), ())), courses[0], 0, 0)
    row: dict[tuple[int, int], list[tuple[_State, Order]]] = {(1, 0): [(start, BACKWARD)]}
    for _ in range(sum(sizes) - 1):
        following: dict[tuple[int, int], list[tuple[_State, Order]]] = {}
        for at, states in row.items():
            for strand, letter in enumerate(BACKWARD + FORWARD):
                if at[strand] < sizes[strand]:
                    place = (at[0] + 1 - strand, at[1] + strand)
                    following.setdefault(place, []).extend(
                        (_after(state, courses[strand], strand, at[strand]), order + letter) for state, order in states
                    )
        row = {place: _undominated(states) for place, states in following.items()}
    found = min((state.lane, order) for state, order in row[sizes])
    return found[1] if found[0] < span_us(backward, forward, plain) else plain


def kept_in(order: Order, backward: Sequence[Segment], forward: Sequence[Segment]) -> Kept:
    """Return the waits at which the turn does not change in an order."""
    segments, at = {BACKWARD: backward, FORWARD: forward}, {BACKWARD: 0, FORWARD: 0}
    found: dict[str, set[int]] = {BACKWARD: set(), FORWARD: set()}
    for letter, following in itertools.pairwise(order):
        at[letter] += 1
        other = FORWARD if letter == BACKWARD else BACKWARD
        if letter == following and at[other] < len(segments[other]):
            found[letter].add(segments[letter][at[letter] - 1].place)
    return Kept(frozenset(found[BACKWARD]), frozenset(found[FORWARD]))


def _after(state: _State, course: _Course, strand: int, index: int) -> _State:
    """Return where a pair stands when a strand has run its next segment."""
    segment = course.segments[index]
    lane, link, ends = max(state.lane, state.ready[strand]), state.link, list(state.ends[strand])
    for work, takes in segment.issues:
        lane += work
        link = max(link, lane) + takes
        ends.append(link)
    lane += segment.rest_us
    awaited = course.awaited[index]
    ready = ends[awaited] if awaited >= 0 else lane + segment.away_us
    left = tuple(ends[at] for at in course.alive[index])
    if strand == 0:
        return _State(lane, link, (ready, state.ready[1]), (left, state.ends[1]))
    return _State(lane, link, (state.ready[0], ready), (state.ends[0], left))


def _undominated(states: list[tuple[_State, Order]]) -> list[tuple[_State, Order]]:
    """Return the states that no other is ahead of in everything, the furthest first, and not too many."""
    kept: list[tuple[_State, Order]] = []
    flats: list[tuple[int, ...]] = []
    for flat, state, order in sorted((state.flat(), state, order) for state, order in states):
        if not any(all(_pairwise_no_later(one, flat)) for one in flats):
            kept.append((state, order))
            flats.append(flat)
        if len(kept) == _BEAM:
            break
    return kept


def _pairwise_no_later(one: tuple[int, ...], other: tuple[int, ...]) -> Iterator[bool]:
    return (mine <= theirs for mine, theirs in zip(one, other, strict=True))
