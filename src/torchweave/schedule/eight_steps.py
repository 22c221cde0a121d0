"""IDEA: the eight steps that DualPipe and DualPipeV share: two streams of microbatches meet on every rank.

A rank has a *near* stage, which the microbatches of one stream reach soon, and a *far* stage, which those of the other
stream reach late. In DualPipe the two streams enter at opposite ends of the ranks; in DualPipeV there is one stream,
and it comes back: DualPipeV on R ranks is one half of DualPipe on 2R.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Literal

from torchweave.schedule.action import Action, pair

Step = tuple[Literal["F", "B", "I", "W"], Literal["near", "far"]]

_F_NEAR: Step = ("F", "near")
_F_FAR: Step = ("F", "far")
_B_NEAR: Step = ("B", "near")
_B_FAR: Step = ("B", "far")
_I_NEAR: Step = ("I", "near")
_I_FAR: Step = ("I", "far")


def eight_steps(place: int, num_places: int, near_first: int, far_first: int, count: int) -> tuple[Action, ...]:
    """Return the actions of one rank.

    Args:
        place: How many ranks lie between this one and the end at which its near microbatches enter.
        num_places: Ranks from that end to the turning point.
        near_first: The number of the first microbatch that goes through the near stage.
        far_first: The same for the far stage.
        count: How many microbatches each of the two stages gets.

    Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.2.1; https://github.com/deepseek-ai/DualPipe.
    """
    stages = {"near": place, "far": 2 * num_places - 1 - place}
    first = {"near": near_first, "far": far_first}
    counts: Counter[tuple[str, bool]] = Counter()
    weights: deque[Action] = deque()  # of input gradients that are done; the oldest comes first

    def action(step: Step) -> Action:
        kind, side = step
        if kind == "W":
            return weights.popleft()
        microbatch = first[side] + counts[side, kind == "F"]
        counts[side, kind == "F"] += 1
        if kind == "I":
            weights.append(Action(stages[side], "W", microbatch))
        return Action(stages[side], kind, microbatch)

    words = ([action(step) for step in word] for word in _words(place, num_places, count))
    return tuple(pair(*word) if len(word) == 2 else word[0] for word in words)


def _words(place: int, num_places: int, count: int) -> Iterator[tuple[Step, ...]]:
    """Yield what a rank does; two steps together are a pair. W is of whichever input gradient is the oldest."""
    outward = num_places - 1 - place  # ranks to the turning point
    weight: Step = ("W", "near")
    # 1: near forwards alone
    for _ in range(2 * outward):
        yield (_F_NEAR,)
    # 2: forwards of both
    for _ in range(place + 1):
        yield (_F_NEAR,)
        yield (_F_FAR,)
    # 3: the first far backwards, split, so that the gradient leaves early
    for _ in range(outward):
        yield (_I_FAR,)
        yield (weight,)
        yield (_F_FAR,)
    # 4, the steady state: the forward of one stream over the backward of the other
    for turn in range(count - 2 * num_places + place + 1):
        if turn == 0 and not outward:  # at the turning point not the first time: others wait for each half of it
            yield (_F_NEAR,)
            yield (_B_FAR,)
        else:
            yield (_F_NEAR, _B_FAR)
        yield (_F_FAR, _B_NEAR)
    # 5: near forwards have ended
    for _ in range(outward):
        yield (_B_FAR,)
        yield (_F_FAR, _B_NEAR)
    # 6: backwards of both; the second half of them split, to keep weight gradients for the bubbles to come
    for number in range(2 * (place + 1)):
        if number <= place:
            yield (_B_NEAR,) if number % 2 else (_B_FAR,)
        else:
            yield (_I_NEAR,) if number % 2 else (_I_FAR,)
    # 7: a weight gradient in each bubble before a near backward
    for _ in range(outward):
        yield (weight,)
        yield (_I_NEAR,)
    # 8: the weight gradients that are left
    for _ in range(place + 1):
        yield (weight,)
