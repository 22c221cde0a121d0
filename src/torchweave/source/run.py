"""IDEA: the primitives of reading code as if it ran: time, places, launches, reads, waits."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchweave.source.facts import Crossing, Fact, Facts, HostWait, Loop, Pinned, Place
from torchweave.source.state import State
from torchweave.source.values import (
    Choice,
    Frame,
    Function,
    Launch,
    Storage,
    Stream,
    Tensor,
    Value,
    Write,
    options,
    tensors_in,
)

# so deep a nesting is not looked into, and so many steps are taken from one entry and in one file: both far beyond
# what people write, and short enough that no file takes long
MOST_DEPTH = 110
MOST_STEPS_OF_ENTRY = 6_000
MOST_STEPS = 200_000


@dataclass(slots=True)
class Call:
    """One call with its arguments.

    Attributes:
        node: The call.
        name: The last part of what is called.
        receiver: What stands before the dot; None where nothing does.
        args: The positional arguments.
        keywords: The named arguments.
        starred: Whether arguments are unpacked, so that not all are known.
    """

    node: ast.Call
    name: str
    receiver: Value | None
    args: list[Value]
    keywords: dict[str, Value]
    starred: bool

    def given(self, position: int, name: str) -> Value | None:
        """Return an argument by position or name, None where it was not given."""
        return self.keywords.get(name) or (self.args[position] if position < len(self.args) else None)

    @property
    def values(self) -> list[Value]:
        """All arguments, the receiver first."""
        return [*([self.receiver] if self.receiver else []), *self.args, *self.keywords.values()]


@dataclass(slots=True)
class Run:
    """One reading of a file, entry by entry.

    Attributes:
        facts: What was seen.
        state: The state at this point.
        frame: The scope at this point.
        ambient: The stream that was current at the entry.
        now: The clock of launches, records and waits.
        began: Its time at the entry.
        default_device: Where tensors are made that name no device; empty where that is not known.
        without_cuda: Whether a test around says that no CUDA device is used here.
    """

    facts: Facts
    state: State
    frame: Frame
    ambient: Stream
    now: int = 0
    began: int = 0
    default_device: str = "cpu"
    without_cuda: bool = False
    loops: list[Loop] = field(default_factory=list)
    guards: list[ast.expr] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    muted: bool = False
    depth: int = 0
    steps: int = 0
    steps_left: int = MOST_STEPS
    opaque_calls: int = 0
    last_collective: int = -1
    statement: ast.stmt | None = None

    # -- where and when

    def go(self, state: State) -> None:
        """Continue from a state."""
        self.state, self.frame.names = state, state.names

    def tick(self) -> int:
        """Move the clock on."""
        self.now += 1
        return self.now

    def place(self, node: ast.expr | ast.stmt) -> Place:
        """Return a node's place, with what is around it."""
        name = self.functions[-1] if self.functions else ""
        return Place(node, tuple(self.loops), tuple(self.guards), name, len(self.functions))

    def note(self, fact: Fact) -> None:
        """Keep a fact."""
        if not self.muted:
            self.facts.rows.append(fact)

    def enter(self) -> bool:
        """Count a step, and go one deeper if that is not too deep or too much; whoever enters counts `depth` back."""
        self.steps += 1
        if self.depth >= MOST_DEPTH or self.steps >= min(MOST_STEPS_OF_ENTRY, self.steps_left):
            return False
        self.depth += 1
        return True

    # -- device work

    def uses_cuda(self, node: ast.expr | ast.stmt, *, context: bool = True) -> None:
        """Remember that the code around means a CUDA device, and that the context exists from here on."""
        self.state.cuda = True
        if context and self.state.context is None:
            self.state.context = node.lineno

    def launch(
        self, node: ast.expr | ast.stmt, reads: Sequence[Value], device: str = "", *, sure: bool = True, what: str = ""
    ) -> Launch | None:
        """Put work into the current stream's queue.

        Args:
            node: The call.
            reads: What it reads.
            device: Where it runs, if the call says so.
            sure: Whether it is certainly device work, and not a call that may do so.
            what: `backward` for what is no forward work, `copy` for what may be a copy to the host.

        Returns:
            What was launched; None for work on the CPU.
        """
        read = [tensor for value in reads for tensor in tensors_in(value)]
        devices = {tensor.device for tensor in read}
        device = device or ("cuda" if "cuda" in devices else "cpu" if devices == {"cpu"} else "")
        if device == "cpu" or self.without_cuda:
            return None
        stream = self.state.current
        side = stream is not None and not stream.ambient
        if device == "cuda":
            self.uses_cuda(node)
        elif side and sure:
            device = "cuda"
        for value in reads:
            self.read_any(value, node, sure=sure)
        launch = Launch(self.tick(), stream, device, self.place(node), copy=what == "copy")
        self.state.pending[launch] = None
        if self.loops and self.loops[-1].depth == len(self.functions):
            self.loops[-1].launches.add(node)
        if what != "backward":
            self.works_on_side()
        return launch

    def works_on_side(self) -> None:
        """Remember that the file has more than a backward to do on the current side stream."""
        stream = self.state.current
        if stream is not None and not stream.ambient and not self.muted:
            self.facts.launched_on.add(stream.text)

    def uses_streams(self) -> None:
        """Remember that the loop around uses streams."""
        if self.loops and self.loops[-1].depth == len(self.functions):
            self.loops[-1].streams = True

    def read(self, tensor: Tensor, node: ast.expr | ast.stmt, *, sure: bool = True) -> None:
        """Let the current stream read a tensor, and tell where it could not know that the tensor is done."""
        stream, storage = self.state.current, tensor.storage
        write = self.state.last_write(storage)
        if stream is None or write is None or write.stream is stream or tensor.device == "cpu":
            return
        place = self.place(node)
        storage.uses[stream] = (self.now + 1, place)
        if self.state.visible(write, stream) or self.captures_by_hand():
            return
        storage.told = True
        certain = sure and tensor.device == "cuda"
        self.note(Crossing(place, tensor.text, write.place.line, write.stream.text, stream.text, certain))

    def read_any(self, value: Value, node: ast.expr | ast.stmt, *, sure: bool = True) -> None:
        """Let the current stream read what a value is or holds; one of several is told only if none of them is done."""
        stream, tensors = self.state.current, list(tensors_in(value))
        if isinstance(value, Choice) and stream is not None:
            writes = [self.state.last_write(tensor.storage) for tensor in tensors]
            if len(tensors) < len(value.options) or any(self.state.visible(write, stream) for write in writes):
                return
        for tensor in tensors:
            self.read(tensor, node, sure=sure)

    def wrote(self, value: Value, launch: Launch | None) -> None:
        """Remember that a launch has written into tensors that were there."""
        for tensor in tensors_in(value):
            if launch is not None and tensor.device != "cpu":
                self.state.written[tensor.storage] = _write(launch)

    def made(self, node: ast.expr | ast.stmt, launch: Launch | None, device: str = "", text: str = "") -> Tensor:
        """Return the tensor that a launch makes."""
        if launch is None:
            return Tensor(text, device=device or "cpu")
        return Tensor(text, device=device, storage=Storage(_write(launch)), loss_of=launch.stream)

    def pinned(self, node: ast.expr) -> Tensor:
        """Make pinned memory."""
        storage = Storage()
        self.note(Pinned(self.place(node), self.stores(node), lambda: storage.kept))
        return Tensor(device="cpu", pinned=True, storage=storage)

    def uploaded(self, node: ast.expr | ast.stmt, text: str = "") -> Tensor:
        """Copy from the host, and wait until it is there: such a copy is done when its call returns."""
        launch = self.launch(node, [], "cuda")
        if launch is not None:
            # the copy is what the call itself waits for, and no work that somebody has waited for
            self.state.pending.pop(launch, None)
        self.state.host_wait(self.state.current, self.now)
        return Tensor(text, device="cuda", loss_of=self.state.current)

    def compute(
        self, node: ast.expr | ast.stmt, reads: Sequence[Value], device: str = "", *, sure: bool = True
    ) -> Tensor:
        """Launch an operation and return its result."""
        launch = self.launch(node, reads, device, sure=sure)
        losses = {tensor.loss_of for value in reads for tensor in tensors_in(value) if tensor.loss_of}
        on_device = device or (
            "cuda" if any(tensor.device == "cuda" for value in reads for tensor in tensors_in(value)) else ""
        )
        result = self.made(node, launch, on_device)
        if losses and len(losses) > 1:
            # a forward over several streams: its backward goes over the same ones
            result.loss_of = None
        return result

    # -- the host waits

    def host_wait(
        self,
        node: ast.expr | ast.stmt,
        how: str,
        stream: Stream | None = None,
        *,
        explicit: bool = False,
        sure: bool = True,
    ) -> None:
        """Let the host wait for a stream, or for the device."""
        awaited = [one for one in self.state.pending if stream is None or one.stream is stream]
        # a stream that has copied to the host is waited for so that the host can read
        idle = stream is not None and all(one.copy for one in awaited)
        self.note(HostWait(self.place(node), how, explicit, sure, wide=explicit and stream is None, idle=idle))
        self.state.host_wait(stream, self.now)

    def download(self, node: ast.expr | ast.stmt, tensor: Value, how: str) -> None:
        """Let the host wait for a tensor: the current stream is waited for."""
        for one in options(tensor):
            if isinstance(one, Tensor):
                if one.device == "cpu":
                    return
                self.read(one, node)
                self.note(HostWait(self.place(node), how, explicit=False, sure=one.device == "cuda"))
                self.state.host_wait(self.state.current, self.now)
                return

    def maybe_waits(self, name: str = "") -> None:
        """Reckon with a call that nobody can look into: the host may have waited in it."""
        self.state.pending.clear()
        self.opaque_calls += 1
        self.tick()
        self.works_on_side()
        if any(word in name.lower() for word in WAITING):
            self.state.host[None] = self.now
            for stream in self.known_streams():
                self.state.wait(stream, None, self.now)

    def known_streams(self) -> list[Stream]:
        """Return the streams that something is known of."""
        found = {*self.state.seen, self.ambient, *(launch.stream for launch in self.state.pending)}
        found |= {value for value in self.state.names.values() if isinstance(value, Stream)}
        return [stream for stream in {*found, self.state.current} if stream is not None]

    # -- what values are

    def as_stream(self, value: Value | None, *, ask: bool = True) -> Stream | None:
        """Return the stream that a value is, None where it is none or not one alone.

        Args:
            value: The value.
            ask: Whether a value of which nothing is known is taken for a stream, because it is used as one.
        """
        if isinstance(value, Stream):
            return value
        if value is None or type(value) is not Value:
            return None
        if not value.text:
            return value.stream  # one by a computed index, say: which one, nobody knows
        if value.stream is None and ask:
            value.stream = Stream(value.text, many=value.many)
        return value.stream

    def captures_graphs(self) -> bool:
        """Return whether the function that is being read captures CUDA graphs."""
        raise NotImplementedError

    def captures_by_hand(self) -> bool:
        """Return whether the function that is being read begins a capture itself: what is captured does not run yet."""
        raise NotImplementedError

    def stores(self, node: ast.expr) -> bool:
        """Return whether the statement that is being read puts a call's value into an attribute or container."""
        statement = self.statement
        if isinstance(statement, ast.Assign):
            return statement.value is node and not all(isinstance(one, ast.Name) for one in statement.targets)
        value = statement.value if isinstance(statement, ast.Expr) else None
        return isinstance(value, ast.Call) and node in value.args and isinstance(value.func, ast.Attribute)

    def inline(self, function: Function, call: Call) -> Value:
        """Read a function of this file with arguments."""
        raise NotImplementedError

    def call_path(self, path: str, call: Call) -> Value:
        """Do what a call by an imported path does."""
        raise NotImplementedError

    def call_method(self, function: Value, call: Call) -> Value:
        """Do what a call of a method, or of a value that is not known, does."""
        raise NotImplementedError

    def opaque(self, call: Call, *, imported: bool = False) -> Value:
        """Reckon with a call into code that is not in sight; `imported` is what another file defines."""
        raise NotImplementedError

    def attribute(self, base: Value, name: str, text: str) -> Value:
        """Return an attribute or item of a value; asking twice gives the same one."""
        found = self.state.heap.get((base, name))
        if found is not None:
            return found
        if name not in base.parts:
            base.parts[name] = self.unknown_part(base, name, text)
        return base.parts[name]

    def one_of_streams(self, base: Value, name: str) -> Value:
        """Return what a function gives that is asked for one of several streams: which, the file does not say."""
        given = self.attribute(base, name + "(...)", name + "()")
        given.many = True
        return given

    def unknown_part(self, base: Value, name: str, text: str) -> Value:
        """Return what a part of a value is that nothing in sight has set."""
        return Value(text)

    def keep(self, value: Value | None) -> None:
        """Somebody else holds these tensors from now on."""
        for tensor in tensors_in(value):
            tensor.storage.kept = True


def _write(launch: Launch) -> Write | None:
    return Write(launch.stream, launch.at, launch.place) if launch.stream is not None else None


WAITING = ("sync", "wait", "barrier", "join", "fence", "flush", "drain", "finish", "stream", "event", "block")
