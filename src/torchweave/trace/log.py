"""What a watched run wrote down beside its trace: plain columns, with times in Unix nanoseconds.

The recorder fills them, the recording's file holds them as JSON, the diagnosis reads them. Nothing here needs torch.
An index of -1 means "not known". A place is the innermost line of the program's own code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchweave.errors import UnreadableInputError

# 2: order is written down where the program asks for it, and no longer where torch does
SCHEMA = 2

# the values of `Events.kind`, and what `a` and `b` mean there; 4 and 9 are only in recordings of form 1
OP = 0  # an operator's end: stream, row in `Operators`
RECORD, WAIT = 1, 2  # event, stream
ALLOCATE = 3  # address, stream that the pool belongs to
SYNC_DEVICE = 5
SYNC_STREAM = 6  # stream
SYNC_EVENT = 7  # event
KEEP = 8  # `record_stream`: address, stream
DRIVER_FREE = 10  # memory went back to the driver, which waits for the device
JOIN = 11  # torch lets them wait by itself: stream, the stream whose work so far it waits for
BACKWARD, BACKWARD_END = 12, 13  # number of the call, a stream that is current where it was called
IN_BACKWARD = 14  # what the next row holds was asked for within a backward: autograd's number of it

# in place of a stream: the one, or ones, that collectives have for themselves
COLLECTIVES = -1
# in place of an event: one whose record nobody saw
UNSEEN = -1

# of an access: its memory was written; every byte between the first and the last was touched
WRITTEN, DENSE = 1, 2


class Table(msgspec.Struct):
    """Columns of one length."""

    def __len__(self) -> int:
        return len(getattr(self, self.__struct_fields__[0]))

    def is_even(self) -> bool:
        """Return whether all columns have the same length."""
        return len({len(getattr(self, name)) for name in self.__struct_fields__}) == 1


def _column() -> Any:
    return msgspec.field(default_factory=list)


class Spans(Table):
    """Calls of the program whose lines are known: operators, waits, synchronizations, `backward()`.

    Attributes:
        begin: Begins, ns.
        end: Ends, ns.
        thread: The system's numbers of the threads.
        place: Rows of `Log.places`.
        name: Rows of `Log.names`.
    """

    begin: list[int] = _column()
    end: list[int] = _column()
    thread: list[int] = _column()
    place: list[int] = _column()
    name: list[int] = _column()


class Events(Table):
    """What was asked of the device, in the order of asking.

    Attributes:
        kind: What, as above.
        at: When, ns.
        thread: The system's number of the thread.
        place: Row of `Log.places`.
        a: See the kinds.
        b: See the kinds.
    """

    kind: list[int] = _column()
    at: list[int] = _column()
    thread: list[int] = _column()
    place: list[int] = _column()
    a: list[int] = _column()
    b: list[int] = _column()


class Operators(Table):
    """Operators that touched device memory.

    Attributes:
        name: Row of `Log.names`.
        first: Its first row of `Log.accesses`; the last ends where the next operator's begin.
    """

    name: list[int] = _column()
    first: list[int] = _column()


class Accesses(Table):
    """Memory that operators read or wrote.

    Attributes:
        base: Address of the allocation.
        low: First byte.
        high: Behind the last byte.
        flags: WRITTEN and DENSE.
    """

    base: list[int] = _column()
    low: list[int] = _column()
    high: list[int] = _column()
    flags: list[int] = _column()


class Moments(Table):
    """Reads of host clocks, or samples of what threads were doing.

    Attributes:
        at: When, ns.
        thread: The system's number of the thread.
        place: Row of `Log.places`.
        name: Row of `Log.names`.
    """

    at: list[int] = _column()
    thread: list[int] = _column()
    place: list[int] = _column()
    name: list[int] = _column()


class Streams(Table):
    """Stream objects, in the order of making.

    Attributes:
        pointer: The CUDA stream behind it.
        place: Row of `Log.places`.
        external: 1 where it wraps a stream that torch did not make.
    """

    pointer: list[int] = _column()
    place: list[int] = _column()
    external: list[int] = _column()


class Uses(Table):
    """Stream objects that became current.

    Attributes:
        at: When, ns.
        thread: The system's number of the thread.
        stream: Row of `Streams`, -1 for a stream that the program did not make.
        pointer: The CUDA stream.
    """

    at: list[int] = _column()
    thread: list[int] = _column()
    stream: list[int] = _column()
    pointer: list[int] = _column()


class Collections(Table):
    """Runs of Python's garbage collector.

    Attributes:
        begin: Begins, ns.
        end: Ends, ns.
        thread: The system's number of the thread.
        generation: 0 to 2.
    """

    begin: list[int] = _column()
    end: list[int] = _column()
    thread: list[int] = _column()
    generation: list[int] = _column()


class Steps(Table):
    """Groups of steps that were timed, the device idle at both ends.

    Attributes:
        watched: 1 where they were recorded, 0 where the program ran untouched.
        count: Steps.
        ms: All of them, ms.
    """

    watched: list[int] = _column()
    count: list[int] = _column()
    ms: list[float] = _column()


class Flow(msgspec.Struct):
    """What one step asked of the device, operator by operator, where that was followed apart from the timed steps.

    Attributes:
        events: As `Log.events`.
        operators: As `Log.operators`.
        accesses: As `Log.accesses`.
    """

    events: Events
    operators: Operators
    accesses: Accesses


class Log(msgspec.Struct):
    """The log of one process.

    Attributes:
        schema: Number of this form.
        places: (file, line, function).
        names: Names of operators and functions.
        spans: Calls with their lines.
        events: What was asked of the device.
        operators: Operators among the events.
        accesses: Their memory.
        flow: The same of one more step, where operators were not followed in those that were timed.
        clocks: Reads of host clocks by the program.
        measured: (first, second): rows of `places` at which clocks are read whose values the program subtracts.
        samples: What threads were doing, at times.
        streams: Stream objects.
        uses: When they became current.
        collections: Garbage collections.
        steps: Timed steps.
        anchors: Before and after each annotation `torchweave.clock`, ns: they join the two clocks.
        environment: Variables that decide about overlap.
        allocator: How counters of the caching allocator grew.
        about: Versions, device, rank, world_size, host, script, as text.
        others: Other processes on the device, as text.
        entry_us: What writing one operator down took, measured in the same process, us.
        notes: What the reader should know of the recording, as sentences.
        error: How the program ended, if with an exception.
    """

    schema: int = SCHEMA
    places: list[tuple[str, int, str]] = _column()
    names: list[str] = _column()
    spans: Spans = msgspec.field(default_factory=Spans)
    events: Events = msgspec.field(default_factory=Events)
    operators: Operators = msgspec.field(default_factory=Operators)
    accesses: Accesses = msgspec.field(default_factory=Accesses)
    flow: Flow | None = None
    clocks: Moments = msgspec.field(default_factory=Moments)
    measured: list[tuple[int, int]] = _column()
    samples: Moments = msgspec.field(default_factory=Moments)
    streams: Streams = msgspec.field(default_factory=Streams)
    uses: Uses = msgspec.field(default_factory=Uses)
    collections: Collections = msgspec.field(default_factory=Collections)
    steps: Steps = msgspec.field(default_factory=Steps)
    anchors: list[tuple[int, int]] = _column()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    allocator: dict[str, int] = msgspec.field(default_factory=dict)
    about: dict[str, str] = msgspec.field(default_factory=dict)
    others: list[str] = _column()
    entry_us: float = 0.0
    notes: list[str] = _column()
    error: str = ""

    def followed(self) -> Log:
        """Return the log with the events of which the memory is known."""
        flow = self.flow
        if flow is None:
            return self
        return msgspec.structs.replace(
            self, events=flow.events, operators=flow.operators, accesses=flow.accesses, flow=None
        )

    def place(self, row: int) -> tuple[str, int, str] | None:
        """Return a place, None where it is not known."""
        return self.places[row] if row >= 0 else None

    def told(self, row: int) -> str:
        """Return a place in words."""
        place = self.place(row)
        return f"{place[0]}:{place[1]}" if place else "a place that was not recorded"


def encode(log: Log) -> bytes:
    """Return a log as JSON."""
    # names and paths can hold what no text file can
    return msgspec.json.encode(msgspec.structs.replace(log, **_clean(log)))


def _clean(log: Log) -> dict[str, Any]:
    return {
        "names": [_text(name) for name in log.names],
        "places": [(_text(file), line, _text(function)) for file, line, function in log.places],
        "environment": {_text(name): _text(value) for name, value in log.environment.items()},
        "about": {_text(name): _text(value) for name, value in log.about.items()},
        "notes": [_text(note) for note in log.notes],
        "error": _text(log.error),
    }


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode("utf-8")


def decode(data: bytes, file: str) -> Log:
    """Return the log that JSON holds.

    Args:
        data: The JSON.
        file: The recording, for errors.

    Raises:
        UnreadableInputError: It is none, of a newer form, or its columns do not fit together.
    """
    try:
        log = msgspec.json.decode(data, type=Log)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(file, str(error)) from error
    if log.schema > SCHEMA:
        raise UnreadableInputError(
            f"A recording has to be of a form that this version knows (up to {SCHEMA})",
            given=f"{file}: form {log.schema}",
            remedy="read it with the torchweave that recorded it, or a newer one",
        )
    wrong = _wrong(log) or _wrong(log.followed())
    if wrong:
        raise _unreadable(file, wrong)
    return log


def _wrong(log: Log) -> str:
    """Return what does not fit together in a log, empty where all does."""
    tables = {name: value for name in log.__struct_fields__ if isinstance(value := getattr(log, name), Table)}
    uneven = [name for name, table in tables.items() if not table.is_even()]
    if uneven:
        return f"the columns of {', '.join(uneven)} differ in length"
    limits = {"place": len(log.places), "name": len(log.names), "stream": len(log.streams)}
    for name, table in tables.items():
        for column, limit in limits.items():
            if any(not -1 <= row < limit for row in getattr(table, column, ())):
                return f"`{name}.{column}` points to rows that are not there"
    if any(not 0 <= row < len(log.places) for pair in log.measured for row in pair):
        return "`measured` points to places that are not there"
    operators, first = log.operators, log.operators.first
    if any(not 0 <= row <= len(log.accesses) for row in first) or first != sorted(first):
        return "`operators.first` points to rows that are not there"
    rows = [b for kind, b in zip(log.events.kind, log.events.b, strict=True) if kind == OP]
    if any(not 0 <= row < len(operators) for row in rows):
        return "`events.b` points to operators that are not there"
    return ""


def _unreadable(file: str, what: str) -> UnreadableInputError:
    return UnreadableInputError(
        "A recording has to hold the log that `torchweave why SCRIPT` wrote",
        given=f"{file}: {what}",
        remedy="record again; a file that was edited or cut looks like this",
    )
