"""IDEA: what is known about a value without running the code: a tensor, a stream, a clock reading, and from where.

Values are compared by identity: two evaluations of `self.side` are the same stream because they are the same object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchweave.source.facts import Place


@dataclass(eq=False, slots=True)
class Value:
    """Something of which nothing is known but where it came from.

    Attributes:
        text: How the source writes it, for messages; empty where it has no name.
        parts: Its attributes and items that were asked for, so that asking twice gives the same value.
        stream: The stream that it was used as, if it was used as one.
        many: It stands for several, as a loop's variable does.
    """

    text: str = ""
    parts: dict[str, Value] = field(default_factory=dict)
    stream: Stream | None = None
    many: bool = False


@dataclass(eq=False, slots=True)
class Dotted(Value):
    """A module, function or class by the path that it was imported by: `torch.cuda.stream`."""

    path: str = ""


@dataclass(eq=False, slots=True)
class Const(Value):
    """A literal."""

    value: object = None


@dataclass(eq=False, slots=True)
class Stream(Value):
    """A CUDA stream; `ambient` is the one that was current when the code began, `many` one of several by an index."""

    ambient: bool = False
    made: Place | None = None


@dataclass(eq=False, slots=True)
class Event(Value):
    """A CUDA event; what it waits for is in the state, by its identity."""


@dataclass(frozen=True, slots=True)
class Write:
    """A write into memory: on which stream, when by the state's clock, and by which operation."""

    stream: Stream
    at: int
    place: Place


@dataclass(eq=False, slots=True)
class Storage:
    """The memory behind a tensor and its views; later writes are in the state, as branches have their own.

    Attributes:
        made: How it was written first; None where that is not known.
        uses: Other streams that read it: when and where last.
        kept: Somebody else may hold it (returned, stored, recorded), so dropping a name frees nothing.
        told: A missing wait on it was reported already.
    """

    made: Write | None = None
    uses: dict[Stream, tuple[int, Place]] = field(default_factory=dict)
    kept: bool = False
    told: bool = False


@dataclass(eq=False, slots=True)
class Tensor(Value):
    """A tensor.

    Attributes:
        device: `cuda`, `cpu`, or empty where it is not known.
        pinned: Whether host memory is visibly pinned (True), visibly not (False), or neither (None).
        origin: The name of the host memory that it wraps, of which no size is known; None where it wraps none.
        mask: It is a comparison's result, so indexing by it has to count.
        loss_of: The stream of the forward that made it; None where that is not known.
        storage: Its memory.
    """

    device: str = ""
    pinned: bool | None = None
    origin: str | None = None
    mask: bool = False
    loss_of: Stream | None = None
    storage: Storage = field(default_factory=Storage)


@dataclass(eq=False, slots=True)
class Clock(Value):
    """A reading of a host clock: when, which launches the host had not waited for, and how often it may have waited.

    Attributes:
        at: When.
        opaque: How many calls of elsewhere there had been, which may have waited.
        awaited: When the last launch was that the host had waited for.
        place: Where.
        pending: The launches that it had not.
    """

    at: int = 0
    opaque: int = 0
    awaited: int = 0
    place: Place | None = None
    pending: tuple[Launch, ...] = ()


@dataclass(eq=False, slots=True)
class Module(Value):
    """Something that is called like a module: it launches work, and does not wait for it."""

    device: str = ""


@dataclass(eq=False, slots=True)
class Loader(Value):
    """A DataLoader, and whether it pins."""

    pinned: bool | None = None


@dataclass(eq=False, slots=True)
class Work(Value):
    """The handle of an asynchronous collective."""

    call: str = ""
    place: Place | None = None
    at: int = 0


@dataclass(eq=False, slots=True)
class Function(Value):
    """A function of this file, and what it sees."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None = None
    frame: Frame | None = None
    owner: Value | None = None


@dataclass(eq=False, slots=True)
class Class(Value):
    """A class of this file."""

    node: ast.ClassDef | None = None
    frame: Frame | None = None


@dataclass(eq=False, slots=True)
class Instance(Value):
    """An object of a class of this file."""

    cls: Class | None = None
    device: str = ""


@dataclass(eq=False, slots=True)
class Items(Value):
    """A tuple, list or dict display: its values by position or constant key."""

    items: tuple[Value, ...] = ()
    keys: tuple[object, ...] = ()


@dataclass(eq=False, slots=True)
class Choice(Value):
    """One of several, depending on a branch."""

    options: tuple[Value, ...] = ()


@dataclass(eq=False, slots=True)
class StreamContext(Value):
    """What `torch.cuda.stream(...)` returns; its stream is None where that is not one known stream."""

    inner: Stream | None = None


@dataclass(eq=False, slots=True)
class Frame:
    """The names of one scope; `outer` is the scope around it."""

    names: dict[str, Value] = field(default_factory=dict)
    outer: Frame | None = None

    def get(self, name: str) -> Value | None:
        """Return what a name means here, None where this file does not say."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.names:
                return frame.names[name]
            frame = frame.outer
        return None


@dataclass(frozen=True, slots=True)
class Launch:
    """Device work that was put into a queue.

    Attributes:
        at: When, by the state's clock.
        stream: The queue; None where it is not known.
        device: `cuda`, or empty where that is not known.
        place: The call.
        copy: It may be a copy to the host.
    """

    at: int
    stream: Stream | None
    device: str
    place: Place
    copy: bool = False


def options(value: Value | None) -> tuple[Value, ...]:
    """Return what a value can be."""
    if value is None:
        return ()
    return value.options if isinstance(value, Choice) else (value,)


_MOST_OPTIONS = 6


def _is_same(one: Value, other: Value) -> bool:
    if isinstance(one, Dotted) and isinstance(other, Dotted):
        return one.path == other.path  # imported twice
    if isinstance(one, Const) and isinstance(other, Const):
        return one.value is other.value
    return one is other


def either(*values: Value | None) -> Value:
    """Return a value that is one of several."""
    flat: list[Value] = []
    for value in values:
        flat += [one for one in options(value) if not any(_is_same(one, other) for other in flat)]
    if len(flat) == 1:
        return flat[0]
    return Choice(options=tuple(flat)) if 0 < len(flat) <= _MOST_OPTIONS else Value()


def tensors_in(value: Value | None, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors that a value can be or holds."""
    for one in options(value):
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, Items) and depth:
            for item in one.items:
                yield from tensors_in(item, depth - 1)


def device_of(value: Value | None) -> str:
    """Return the device that a value names, or is on: `cuda`, `cpu`, or empty where it is not known.

    A choice between both (`"cuda" if torch.cuda.is_available() else "cpu"`) is `cuda`: it is meant to run there.
    """
    found = {_device_of(one) for one in options(value)}
    return "cuda" if "cuda" in found else "cpu" if found == {"cpu"} else ""


def _device_of(value: Value) -> str:
    if isinstance(value, (Tensor, Module, Instance)):
        return value.device
    if isinstance(value, Const):
        if isinstance(value.value, str):
            kind = value.value.partition(":")[0]
            return kind if kind in ("cuda", "cpu") else ""
        return "cuda" if isinstance(value.value, int) and not isinstance(value.value, bool) else ""
    return ""
