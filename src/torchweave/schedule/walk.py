"""IDEA: run a plan through without running it: a worklist of ranks, each going on until it has to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

from torchweave.schedule.action import COMPUTE, Action
from torchweave.schedule.plan import Result, inputs_of, result_of


class Walk:
    """What has been run, and where each rank stands.

    Attributes:
        places: For each rank, how many of its actions have run.
        given: What the actions that ran have given.

    Args:
        rows: The actions of each rank; what a rank has not come to yet may be changed.
        needs: What an action waits for.
        gives: What an action gives when it has run.
        announces: What an action gives as soon as its rank has come to it, even if it waits.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        needs: Callable[[Action], Sequence[Hashable]],
        gives: Callable[[Action], Sequence[Hashable]],
        announces: Callable[[Action], Sequence[Hashable]] | None = None,
    ) -> None:
        self.rows, self.needs, self.gives, self.announces = rows, needs, gives, announces
        self.places = [0] * len(rows)
        self.given: set[Hashable] = set()
        self._waiting: dict[Hashable, list[int]] = {}
        self._ready = deque(range(len(rows)))

    def __iter__(self) -> Iterator[tuple[int, Action, Sequence[Hashable]]]:
        """Yield rank, action and its needs, each after all that it needs; ends where every rank is done or waits."""
        ready, given, waiting, places = self._ready, self.given, self._waiting, self.places
        while ready:
            rank = ready.popleft()
            row = self.rows[rank]
            while places[rank] < len(row):
                action = row[places[rank]]
                if self.announces is not None:
                    self._give(self.announces(action))
                needs = self.needs(action)
                if not given.issuperset(needs):
                    waiting.setdefault(next(need for need in needs if need not in given), []).append(rank)
                    break
                places[rank] += 1
                self._give(self.gives(action))
                yield rank, action, needs

    def missing(self, action: Action) -> Hashable | None:
        """Return what an action still waits for first; None if for nothing."""
        return next((need for need in self.needs(action) if need not in self.given), None)

    def look_again(self, rank: int) -> None:
        """Go on with a rank whose row was changed where it waits."""
        self._ready.append(rank)

    def heads(self) -> Iterator[tuple[int, Action]]:
        """Yield each rank that is not done, and the action that it waits at."""
        for rank, (row, place) in enumerate(zip(self.rows, self.places, strict=True)):
            if place < len(row):
                yield rank, row[place]

    def _give(self, results: Sequence[Hashable]) -> None:
        self.given.update(results)
        for result in results:
            if result in self._waiting:
                self._ready.extend(self._waiting.pop(result))


def needs_of(action: Action, num_stages: int) -> Sequence[Result]:
    """Return the results that an action waits for, wherever they are made; those of a pair are both halves'."""
    if action.parts:
        return [need for half in action.parts for need in inputs_of(half, num_stages)]
    return inputs_of(action, num_stages) if action.kind in COMPUTE else ()


def gifts_of(action: Action) -> Sequence[Result]:
    """Return the results that an action makes."""
    if action.parts:
        return [result_of(half) for half in action.parts]
    return (result_of(action),) if action.kind in COMPUTE else ()
