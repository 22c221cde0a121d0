"""IDEA: what happens in a file that rules care about, in the order in which it would run. Rules only read these."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

_F = TypeVar("_F", bound="Fact")


@dataclass(eq=False, slots=True)
class Loop:
    """A loop around something.

    Attributes:
        node: Its statement or comprehension.
        count: How often it runs, where that is a literal; None where it is not known.
        comprehension: Whether it is one.
        display: Whether it goes over a list that is written out, as one writes out a few cases.
        mapping: Whether it goes over a mapping's or model's parts, and not over steps.
        depth: How many calls of this file's functions it is in.
        streams: Its own function uses a side stream in it, and in no loop inside it.
        launches: Calls in it, and in no loop or function inside it, that launch device work.
        awaited: Host clocks or event times are read in it: what is synchronized there is being measured.
        measured: The same, in it or in a loop inside it.
    """

    node: ast.AST
    count: int | None = None
    comprehension: bool = False
    display: bool = False
    mapping: bool = False
    depth: int = 0
    streams: bool = False
    launches: set[ast.AST] = field(default_factory=set)
    awaited: bool = False
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where something happens.

    Attributes:
        node: The call or expression.
        loops: The loops around it, the innermost last; calls of this file's functions are looked through.
        guards: The tests of `if` inside the innermost loop, or inside the function where there is no loop.
        function: The name of the function that it is in; empty for the file's own statements.
        depth: How many calls of this file's functions it is in.
    """

    node: ast.expr | ast.stmt
    loops: tuple[Loop, ...] = ()
    guards: tuple[ast.expr, ...] = ()
    function: str = ""
    depth: int = 0

    @property
    def loop(self) -> Loop | None:
        """The innermost loop, if it is in this function or in the one that called it: not farther away."""
        near = self.loops and self.depth - self.loops[-1].depth <= 1 and not self.loops[-1].display
        return self.loops[-1] if near else None

    @property
    def line(self) -> int:
        """Its line, from 1."""
        return self.node.lineno


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that happens at a place."""

    place: Place


@dataclass(frozen=True, slots=True)
class ClockPair(Fact):
    """The difference of two clock readings is taken; place is the second reading.

    Attributes:
        first: The line of the first reading.
        launch: The line of the last launch that nothing waited for.
        sure: Whether that is visibly a device's work, and all that is between.
        label: What the difference is put into, as written.
    """

    first: int
    launch: int
    sure: bool
    label: str


@dataclass(frozen=True, slots=True)
class Backward(Fact):
    """Backward is called while a side stream is current.

    Attributes:
        stream: That stream, as written.
        call: What is called.
        loss: What it is called on, as written.
        forward: The stream of the forward, as written; None where the file does not show it.
    """

    stream: str
    call: str
    loss: str
    forward: str | None


@dataclass(frozen=True, slots=True)
class UnwaitedGradient(Fact):
    """Backward is given gradients that were made outside the stream context, which did not wait.

    Attributes:
        stream: The stream, as written.
        gradient: The gradients, as written.
        sure: Whether the file shows where they were made.
    """

    stream: str
    gradient: str
    sure: bool


@dataclass(frozen=True, slots=True)
class Crossing(Fact):
    """A tensor is used on another stream than it was made on, with no wait between.

    Attributes:
        tensor: The tensor, as written.
        made: The line where it was made.
        made_on: The stream it was made on, as written; empty for the surrounding one.
        used_on: The stream it is used on, likewise.
        sure: Whether both are visibly device work.
    """

    tensor: str
    made: int
    made_on: str
    used_on: str
    sure: bool


@dataclass(frozen=True, slots=True)
class FreedEarly(Fact):
    """A tensor's last name goes while another stream may still use it.

    Attributes:
        tensor: The tensor, as written.
        made_on: The stream it was made on, as written; empty for the surrounding one.
        used_on: The stream that may still use it.
        freed: The line where its name goes.
    """

    tensor: str
    made_on: str
    used_on: str
    freed: int


@dataclass(frozen=True, slots=True)
class SelfWait(Fact):
    """A stream is told to wait for itself.

    Attributes:
        stream: The stream, as written.
    """

    stream: str


@dataclass(frozen=True, slots=True)
class HostWait(Fact):
    """The host waits for the device.

    Attributes:
        how: The call or test, in words.
        explicit: Whether that is its purpose (`synchronize`).
        idle: Whether it may be there for the host to read what was copied to it, or waits for work of elsewhere.
        sure: Whether it is visibly about device memory.
        wide: Whether it waits for the whole device.
    """

    how: str
    explicit: bool
    sure: bool
    wide: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True)
class HostRead(Fact):
    """The host reads memory that a copy to it has filled, or a measured time."""


@dataclass(frozen=True, slots=True)
class PageableUpload(Fact):
    """An asynchronous copy to the device from memory that is visibly not pinned.

    Attributes:
        source: The memory, as written; empty where it has no name.
        names: What else the file calls it: what it is made from, and what the copy is put into.
        sure: Whether nothing outside the file can change that.
    """

    source: str
    names: str
    sure: bool


@dataclass(frozen=True, slots=True)
class Pinned(Fact):
    """Pinned memory is made.

    Attributes:
        kept: It is put into a container or attribute at once, so it outlives the loop's turn.
        is_held: Asks, when the file was read, whether it was put into one later.
    """

    kept: bool
    is_held: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class CacheEmptied(Fact):
    """`torch.cuda.empty_cache()` is called."""


@dataclass(frozen=True, slots=True)
class StreamMade(Fact):
    """A stream is made.

    Attributes:
        kept: It is put into a container or attribute, so it outlives the loop's turn.
        of_device: It is made for a device that the loop goes over.
        for_capture: It is made in a function that captures CUDA graphs.
    """

    kept: bool
    of_device: bool
    for_capture: bool


@dataclass(frozen=True, slots=True)
class EnvironmentSet(Fact):
    """An environment variable is set.

    Attributes:
        name: Its name.
        value: Its value; None where it is no literal.
        context: The line of the call before it that made the CUDA context; None where none did.
    """

    name: str
    value: str | None
    context: int | None


@dataclass(frozen=True, slots=True)
class AwaitedAtOnce(Fact):
    """An asynchronous collective is waited for with nothing between.

    Attributes:
        collective: The line of the collective.
        call: Its name.
    """

    collective: int
    call: str


@dataclass(frozen=True, slots=True)
class NoSuchCall(Fact):
    """Something is called that torch does not have.

    Attributes:
        why: What is wrong, in one sentence.
        instead: What to write.
        sure: Whether it is impossible in every version of torch.
    """

    why: str
    instead: str
    sure: bool


@dataclass(slots=True)
class Facts:
    """All facts of a file.

    Attributes:
        rows: The facts in order.
        launched_on: The texts of side streams that forward work is launched on somewhere in the file.
        on_cpu: The file communicates between CPUs alone.
        asked_for: Names that the file asks for with `hasattr` or `getattr` before it uses them.
    """

    rows: list[Fact] = field(default_factory=list)
    launched_on: set[str] = field(default_factory=set)
    on_cpu: bool = False
    asked_for: frozenset[str] = frozenset()

    def of(self, kind: type[_F]) -> list[_F]:
        """Return the facts of one kind."""
        return [row for row in self.rows if isinstance(row, kind)]
