"""Which steps are watched: a program's first steps are another program, and watching has to be compared with not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["start", "before", "watched", "after", "flow", "over"]

# without a word from the user: at least so many steps, at most so many, and settled within so much
LEAST_WARM, MOST_WARM, SETTLED = 3, 10, 0.1
DEFAULT_STEPS = 2


@dataclass(slots=True)
class Phases:
    """Goes from phase to phase, a step at a time.

    `start` is recorded too, up to the first step's end: a program without steps has nothing else. That recording is
    thrown away once another is whole. As many steps as are watched run untouched before
    (the last of the warm-up that the user asked for, if it has room) and after. Then the memory of one more step is
    followed for races (`flow`), which costs the host too much to do it while it is timed.

    Attributes:
        skip: Steps to leave out; None waits until they take equally long.
        steps: Steps to watch.
        phase: The phase of the next step.
        num_done: Steps that have ended.
        left: Steps of this phase that are still to come.
        first_watched: The first step that is watched, from 0; -1 before that is known.
    """

    skip: int | None = None
    steps: int = DEFAULT_STEPS
    phase: Phase = "start"
    num_done: int = 0
    left: int = 0
    first_watched: int = -1
    _last_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.skip == 0:
            self._enter("watched")

    def step(self, ms: float) -> Phase:
        """Take note of a step, and return the phase of the next.

        Args:
            ms: How long the step took, by the host's clock.
        """
        self.num_done += 1
        if self.phase == "start":
            self._last_ms.append(ms)
            self._warm()
        elif self.phase != "over":
            self.left -= 1
            if self.left == 0:
                follows: dict[str, Phase] = {"before": "watched", "watched": "after", "after": "flow", "flow": "over"}
                self._enter(follows[self.phase])
        return self.phase

    def end(self) -> None:
        """Watch no further step."""
        self.phase = "over"

    def _enter(self, phase: Phase) -> None:
        self.phase, self.left = phase, 1 if phase == "flow" else self.steps
        if phase == "watched":
            self.first_watched = self.num_done

    def _warm(self) -> None:
        if self.skip is None:
            if self._settled():
                self._enter("before")
            return
        if self.num_done == self.skip:
            self._enter("watched")
        elif self.num_done == self.skip - self.steps:
            self._enter("before")

    def _settled(self) -> bool:
        """Return whether the warm-up is over: the last two steps took about equally long."""
        if self.num_done < LEAST_WARM:
            return False
        before, last = self._last_ms[-2:]
        return abs(last - before) <= SETTLED * max(before, last) or self.num_done >= MOST_WARM
