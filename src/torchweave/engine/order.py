"""IDEA: the order in which two strands meet the communicators, computed and proved before anything is woven.

A strand's *record* is what it did in its first, serial run: a tuple of steps. A step is either an issue
`(operation, channel)` or a wait `("wait", n)` for the strand's n-th issue (-1: for something issued elsewhere).
A *channel* is a group's name, or `group:source>destination` for point-to-point operations.

Two communicators' worth of operations cannot be told apart by the backend: it pairs the n-th operation of one rank with
the n-th of another, whatever they are. So the woven order is right only if, on every channel, each member issues the
very operations that the serial run issued, in one and the same new order, and if no rank then waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Step: TypeAlias = tuple[str, str | int]
Record: TypeAlias = tuple[Step, ...]

WAIT = "wait"
# a crossing without a channel: the end of a `communication()` region
REGION = "communication"


class Action(NamedTuple):
    """One thing that a rank does in the woven run.

    Attributes:
        channel: The channel on which it issues an operation; empty for a wait.
        serial: The operation's number on that channel in the serial run; for a wait, its number on the channel waited
            for, or -1 where the wait is for something issued elsewhere.
        waits_on: The channel waited for; empty for an issue.
    """

    channel: str
    serial: int
    waits_on: str


class Kept(NamedTuple):
    """The waits at which a strand keeps its turn: their places in the strand's record.

    Attributes:
        backward: Of the backward strand.
        forward: Of the forward strand.
    """

    backward: frozenset[int] = frozenset()
    forward: frozenset[int] = frozenset()


# the strands alternate at every wait
ALTERNATING = Kept()


class _Cursor:
    """One strand while the woven order is computed: where it stands, and what its issues are called."""

    def __init__(self, record: Record, counts: dict[str, int], kept: frozenset[int]) -> None:
        self._record, self._at, self._pending, self._kept = record, 0, False, kept
        self._issues: list[tuple[str, int]] = []
        for operation, channel in record:
            if operation != WAIT and operation != REGION:
                number = counts.get(str(channel), 0)
                counts[str(channel)] = number + 1
                self._issues.append((str(channel), number))
        self._next_issue = 0

    @property
    def done(self) -> bool:
        return self._at >= len(self._record) and not self._pending

    def run(self, alone: bool) -> Iterator[Action]:
        """Go on to where the turn changes, or to the end where the other strand has ended."""
        if self._pending:
            self._pending = False
            yield self._wait(self._record[self._at - 1])
        while self._at < len(self._record):
            step = self._record[self._at]
            self._at += 1
            if step[0] == REGION or step[0] == WAIT:
                if not alone and self._at - 1 not in self._kept:
                    self._pending = True
                    return
                yield self._wait(step)
            else:
                channel, number = self._issues[self._next_issue]
                self._next_issue += 1
                yield Action(channel, number, "")

    def _wait(self, step: Step) -> Action:
        if step[0] == REGION or step[1] == -1:
            return Action("", -1, "")
        channel, number = self._issues[int(step[1])]
        return Action("", number, channel)


def woven(backward: Record, forward: Record, kept: Kept = ALTERNATING) -> tuple[Action, ...]:
    """Return what a rank does when its two strands take turns, backward first.

    Args:
        backward: The backward strand's steps.
        forward: The forward strand's steps.
        kept: The waits at which the turn does not change; at all others it does.

    Returns:
        Issues and waits in the order in which the rank carries them out.
    """
    counts: dict[str, int] = {}
    # serial order is backward, then forward: the numbers of the operations are those of the serial run
    strands = [_Cursor(backward, counts, kept.backward), _Cursor(forward, counts, kept.forward)]
    actions: list[Action] = []
    turn = 0
    while not all(strand.done for strand in strands):
        actions.extend(strands[turn].run(alone=strands[1 - turn].done))
        turn = 1 - turn
    return tuple(actions)


def members_of(channel: str, groups: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that have to take part in an operation on a channel.

    Args:
        channel: A group's name, or `group:source>destination`.
        groups: Global ranks of each group by its name.
    """
    group, _, ends = channel.rpartition(":")
    if ends and ">" in ends and group:
        source, destination = ends.split(">")
        return (int(source), int(destination))
    return tuple(groups[channel])


def disagreement(plans: Mapping[int, Sequence[Action]], groups: Mapping[str, Sequence[int]]) -> str:
    """Say why the ranks' woven orders do not fit together, or return the empty string where they do.

    Args:
        plans: The woven order of every rank that any channel connects.
        groups: Global ranks of each group by its name.

    Returns:
        One sentence, or "" where every channel's order is the same on all its members and nobody waits for ever.
    """
    orders: dict[str, dict[int, list[int]]] = {}
    for rank, plan in plans.items():
        for action in plan:
            if action.channel:
                orders.setdefault(action.channel, {}).setdefault(rank, []).append(action.serial)
    for channel, by_rank in sorted(orders.items()):
        members = members_of(channel, groups)
        first = by_rank.get(members[0], [])
        for rank in members[1:]:
            if by_rank.get(rank, []) != first:
                return (
                    f"on {channel} rank {members[0]} would issue its operations in the order {first}, "
                    f"rank {rank} in the order {by_rank.get(rank, [])} (numbers of the serial run)"
                )
    return _deadlock(plans, groups)


def _deadlock(plans: Mapping[int, Sequence[Action]], groups: Mapping[str, Sequence[int]]) -> str:
    """Run all ranks' plans against each other; an operation is complete when all its members have issued it."""
    at = dict.fromkeys(plans, 0)
    issued: dict[tuple[str, int], set[int]] = {}

    def complete(action: Action) -> bool:
        if not action.waits_on:
            return True
        members = members_of(action.waits_on, groups)
        return issued.get((action.waits_on, action.serial), set()).issuperset(members)

    moved = True
    while moved:
        moved = False
        for rank, plan in plans.items():
            while at[rank] < len(plan):
                action = plan[at[rank]]
                if action.channel:
                    issued.setdefault((action.channel, action.serial), set()).add(rank)
                elif not complete(action):
                    break
                at[rank] += 1
                moved = True
    for rank, plan in sorted(plans.items()):
        if at[rank] < len(plan):
            action = plan[at[rank]]
            return f"rank {rank} would wait for ever for operation {action.serial} on {action.waits_on}"
    return ""
