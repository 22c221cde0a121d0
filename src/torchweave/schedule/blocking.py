"""IDEA: who waits for whom, if a send and its receive wait for each other: the strictest that a backend can be.

A transfer takes place when both ranks have come to it. A plan that gets through so gets through on NCCL and on gloo,
whose sends may end sooner.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from torchweave.schedule.action import COMPUTE, FORWARD, INPUT, P2P, RECEIVES, SENDS, Action, Kind
from torchweave.schedule.plan import Plan, Result, inputs_of
from torchweave.schedule.walk import Walk, gifts_of

_OTHER_END: dict[str, tuple[int, Kind]] = {
    "SEND_F": (1, "RECV_F"),
    "RECV_F": (-1, "SEND_F"),
    "SEND_B": (-1, "RECV_B"),
    "RECV_B": (1, "SEND_B"),
}


class Wait(NamedTuple):
    """An action that waits for what never comes.

    Attributes:
        rank: Who waits.
        place: The action in that rank's row, counted from 0.
        wanted: What is waited for, in words.
        peer: The rank that it comes from.
        head: What that rank itself waits at; None where it is the same rank, which would come to it only later.
    """

    rank: int
    place: int
    wanted: str
    peer: int
    head: Action | None


class Dependencies:
    """What each action of a plan waits for, and where that comes from.

    Args:
        plan: Any plan, right or wrong.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._has_p2p = any(action.kind in P2P for row in plan.ranks for action in row)
        self._needs: dict[Action, list[Hashable]] = {}
        self._places: dict[Hashable, tuple[int, int]] = {}  # where each thing that is waited for comes from
        for rank, row in enumerate(plan.ranks):
            for place, action in enumerate(row):
                self._needs[action] = self._needs_of(action)
                for thing in (*_gives(action), *_announces(action)):
                    self._places.setdefault(thing, (rank, place))

    def too_early(self) -> Iterator[Wait]:
        """Yield what stands before what it needs on its own rank."""
        for rank, row in enumerate(self.plan.ranks):
            for place, action in enumerate(row):
                for thing in self._needs[action]:
                    source_rank, source_place = self._places.get(thing, (rank, -1))
                    if source_rank == rank and source_place >= place:
                        yield Wait(rank, place, _said(thing), rank, None)

    def circles(self) -> Iterator[Wait]:
        """Yield what waits in a circle of ranks; what never comes for another reason is taken as there."""
        needs: dict[Action, list[Hashable]] = {}
        for rank, row in enumerate(self.plan.ranks):
            for place, action in enumerate(row):
                needs[action] = [thing for thing in self._needs[action] if self._can_come(thing, rank, place)]
        walk = Walk(self.plan.ranks, needs.__getitem__, _gives, _announces)
        for _ in walk:
            pass
        heads = dict(walk.heads())
        missing = {rank: walk.missing(action) for rank, action in heads.items()}
        sources = {rank: self._places[thing][0] for rank, thing in missing.items()}
        for rank in sorted(_in_circles(sources)):
            yield Wait(rank, walk.places[rank], _said(missing[rank]), sources[rank], heads[sources[rank]])

    def _can_come(self, thing: Hashable, rank: int, place: int) -> bool:
        """Return whether a thing comes from another rank, or from an earlier place of the same one."""
        source_rank, source_place = self._places.get(thing, (rank, place))
        return source_rank != rank or source_place < place

    def _needs_of(self, action: Action) -> list[Hashable]:
        """Return the things that an action waits for; a result of another rank comes with its receive."""
        if action.kind in SENDS:
            own = (FORWARD if action.kind == "SEND_F" else INPUT, action.stage, action.microbatch)
            return [own, ("at", _other_end(action))]
        if action.kind in RECEIVES:
            return [("at", _other_end(action))]
        if action.kind not in COMPUTE:
            return []
        leaves, num_stages = action.leaves(), self.plan.num_stages
        return [self._arrival(leaf, wanted) for leaf in leaves for wanted in inputs_of(leaf, num_stages)]

    def _arrival(self, leaf: Action, wanted: Result) -> Hashable:
        """Return what brings a result to an action: the result itself, or the receive of it."""
        kind, stage, microbatch = wanted
        plan = self.plan
        if not self._has_p2p or microbatch is None or not (plan.has(stage, microbatch) and plan.has(leaf.stage, 0)):
            return wanted
        if stage == leaf.stage or plan.rank_of(stage, microbatch) == plan.rank_of(leaf.stage, microbatch):
            return wanted
        return "done", Action(leaf.stage, "RECV_F" if kind == FORWARD else "RECV_B", microbatch)


def _other_end(action: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    step, kind = _OTHER_END[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


def _gives(action: Action) -> Sequence[Hashable]:
    return [("done", action)] if action.kind in RECEIVES else gifts_of(action)


def _announces(action: Action) -> list[Hashable]:
    return [("at", action)] if action.kind in P2P else []


def _said(thing: Hashable) -> str:
    """Say in words what is waited for."""
    match thing:
        case ("at" | "done", action):
            return str(action)
        case ("F", stage, microbatch):
            return f"the forward of microbatch {microbatch} through stage {stage}"
        case (_, stage, microbatch):
            return f"the input gradient of microbatch {microbatch} from stage {stage}"
    raise AssertionError(f"nobody waits for {thing!r}")


def _in_circles(following: dict[int, int]) -> set[int]:
    """Return the members of the circles in a map from each to the one that it waits for."""
    found: set[int] = set()
    done: set[int] = set()
    for start in following:
        path: list[int] = []
        node = start
        while node not in done:
            done.add(node)
            path.append(node)
            node = following[node]
        if node in path:
            found.update(path[path.index(node) :])
    return found
