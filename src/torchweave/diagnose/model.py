"""The frozen record of a diagnosis: computed once, rendered by `torchweave.reporting` in several forms.

All times in columns and intervals are integer nanoseconds since `Diagnosis.origin_ns` (the window's first work), all
`_ms` numbers are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from torchweave.intervals import EMPTY, Intervals

Verdict: TypeAlias = Literal["overlapped", "partial", "serial", "nothing_to_overlap", "race", "mistimed"]
Certainty: TypeAlias = Literal["shown", "likely"]

# the values of `Lane.side`
NO_SIDE, FIRST_SIDE, SECOND_SIDE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the user's program, as exactly as the trace knows it; None where it does not.

    Attributes:
        file: The file of the user's frame nearest to the call.
        line: The line that the recorder gave with that frame.
        function: The function that was called there, or that was running.
        op: The outermost operator around the call.
        call: The runtime or driver call.
        caller: The user's function that `file` and `line` belong to.
    """

    file: str | None = None
    line: int | None = None
    function: str | None = None
    op: str | None = None
    call: str | None = None
    caller: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One of several places that a cause was charged at.

    Attributes:
        where: The place.
        cost_ms: Lost overlap and idle time charged there.
        count: How often.
    """

    where: Where
    cost_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class CauseFound:
    """One cause with everything that was charged to it.

    Attributes:
        cause: Its fixed name.
        lost_ms: Lost overlap charged to it; over all causes these add up to `Numbers.lost_ms`.
        idle_ms: Idle time charged to it; over all causes these add up to `Numbers.idle_ms`.
        recoverable: False where the program cannot mend it.
        certainty: `shown` where the trace proves it, `likely` where it fits best.
        where: The place with the greatest cost.
        evidence: Why, in one or two sentences with numbers from this trace.
        mend: What to do, as text and code.
        places: All places, the dearest first.
        lost_intervals: The moments behind `lost_ms` (their sum is scaled to it), shape (n, 2), ns.
        idle_intervals: The moments behind `idle_ms`, shape (n, 2), ns.
        costs_time: False for what costs results or measurements instead; such causes stand first.
    """

    cause: str
    lost_ms: float
    idle_ms: float
    recoverable: bool
    certainty: Certainty
    where: Where
    evidence: str
    mend: str
    places: tuple[Place, ...] = ()
    lost_intervals: Intervals = field(default_factory=lambda: EMPTY)
    idle_intervals: Intervals = field(default_factory=lambda: EMPTY)
    costs_time: bool = True

    @property
    def cost_ms(self) -> float:
        """Lost overlap and idle time together."""
        return self.lost_ms + self.idle_ms


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a window.

    Attributes:
        span_ms: First start to last end of device work.
        busy_ms: Union over all streams.
        overlapped_ms: Sum of the streams' busy times minus `busy_ms`.
        possible_ms: Busy time of the lesser side.
        lost_ms: `possible_ms` minus the time in which both sides ran.
        idle_ms: Time in the span in which nothing ran.
        both_ms: Time in which both sides ran.
        first_ms: Busy time of the first side.
        second_ms: Busy time of the second side.
    """

    span_ms: float = 0.0
    busy_ms: float = 0.0
    overlapped_ms: float = 0.0
    possible_ms: float = 0.0
    lost_ms: float = 0.0
    idle_ms: float = 0.0
    both_ms: float = 0.0
    first_ms: float = 0.0
    second_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Communication:
    """How much of the communication ran together with computation.

    Attributes:
        busy_ms: Time in which communication ran.
        hidden_ms: Of it, time in which computation ran too.
        exposed_ms: The rest.
        hidden_share: Hidden over busy, 0 to 1.
    """

    busy_ms: float
    hidden_ms: float
    exposed_ms: float
    hidden_share: float


@dataclass(frozen=True, slots=True)
class SidesFound:
    """The two kinds of work that should have run together.

    Attributes:
        names: Their two names, empty where there are no two sides.
        why: By which rule they were chosen, as a sentence.
        chosen: `asked` where the user chose them, else `default`.
    """

    names: tuple[str, ...]
    why: str
    chosen: Literal["asked", "default"] = "default"


@dataclass(frozen=True, slots=True)
class StreamNumbers:
    """One stream's numbers.

    Attributes:
        device: Device ordinal.
        stream: Stream number.
        num_ops: Operations in the window.
        busy_ms: Union of them.
        idle_ms: Span minus busy.
    """

    device: int
    stream: int
    num_ops: int
    busy_ms: float
    idle_ms: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream as it is drawn: columns of one length, sorted by begin.

    Attributes:
        device: Device ordinal.
        stream: Stream number.
        begin: Starts, int64 ns.
        end: Ends, int64 ns.
        name: Codes into `Diagnosis.names`, int64.
        side: NO_SIDE, FIRST_SIDE or SECOND_SIDE, int8.
    """

    device: int
    stream: int
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    name: npt.NDArray[np.int64]
    side: npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Watched:
    """What watching cost a step, measured in the same run.

    Attributes:
        num_steps: Steps that were watched.
        watched_ms: One of them.
        plain_ms: A step without watching.
        least_ms: The shortest group of those, a step.
        most_ms: The longest.
    """

    num_steps: int
    watched_ms: float
    plain_ms: float
    least_ms: float
    most_ms: float

    @property
    def factor(self) -> float:
        """How many times as long a watched step is."""
        return self.watched_ms / self.plain_ms if self.plain_ms else 0.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that is known about one trace and the overlap in it.

    Attributes:
        file: The file as the user named it.
        rank: The rank that recorded it, None where it does not say.
        verdict: One word.
        sentence: The verdict as a sentence with its numbers.
        sides: What should have run together, and by which rule.
        numbers: The window's numbers.
        communication: None where no collective ran.
        streams: By device and stream number.
        causes: By cost, the dearest first; empty where nothing was lost.
        lanes: One a stream, as drawn.
        names: The strings that `Lane.name` refers to.
        not_known: What the trace cannot tell, and how to record one that can.
        warnings: What was wrong with the file.
        origin_ns: Begin of the window on the recorder's own clock; zero of all columns here.
        device_name: The device's name, empty where the trace does not say.
        remarks: What was seen beside the causes, as sentences.
        watched: What watching cost, where a watched run measured it.
    """

    file: str
    rank: int | None
    verdict: Verdict
    sentence: str
    sides: SidesFound
    numbers: Numbers
    communication: Communication | None
    streams: tuple[StreamNumbers, ...]
    causes: tuple[CauseFound, ...]
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    not_known: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    origin_ns: int = 0
    device_name: str = ""
    remarks: tuple[str, ...] = ()
    watched: Watched | None = None
