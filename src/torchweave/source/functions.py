"""IDEA: this file's functions are looked through: a call reads the body with its arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchweave.source.expressions import text_of
from torchweave.source.names import Names
from torchweave.source.run import Call
from torchweave.source.state import State, meet
from torchweave.source.values import (
    Class,
    Const,
    Event,
    Frame,
    Function,
    Instance,
    Items,
    Loader,
    Module,
    Stream,
    Tensor,
    Value,
    either,
    options,
    tensors_in,
)

_MOST_INLINED = 7  # calls of this file's functions within each other

Signal = str  # how a block ends: "", "return", "break", "continue", "raise"


@dataclass(slots=True)
class Activation:
    """A function that is being read."""

    node: ast.AST
    returns: list[tuple[State, Value]] = field(default_factory=list)
    exits: list[list[State]] = field(default_factory=list)  # of the loops around: states at break and continue
    at_yield: Callable[[Value], None] | None = None
    yielded: bool = False


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of a function from its text.

    Attributes:
        names: The names and attributes in it.
        generator: Whether it yields.
        closures: Whether functions are made in it, which may keep its names.
    """

    names: frozenset[str]
    generator: bool
    closures: bool

    @staticmethod
    def of(node: ast.AST) -> Traits:
        """Return a function's traits."""
        inside = list(ast.walk(node))
        names = {str(getattr(one, "id", None) or getattr(one, "attr", "")) for one in inside}
        generator = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in inside)
        closures = any(isinstance(one, (ast.Lambda, ast.FunctionDef)) and one is not node for one in inside)
        return Traits(frozenset(names), generator, closures)


class Functions(Names):
    """Reads functions."""

    activations: list[Activation]
    assignments: dict[ast.ClassDef, list[tuple[str, ast.expr]]]
    traits: dict[ast.AST, Traits]
    cached: dict[ast.AST | None, Value]

    def block(self, statements: Sequence[ast.stmt]) -> Signal:
        """Read statements until one leaves the block."""
        raise NotImplementedError

    def traits_of(self, node: ast.AST) -> Traits:
        """Return a function's traits, found once."""
        if node not in self.traits:
            self.traits[node] = Traits.of(node)
        return self.traits[node]

    def captures_graphs(self) -> bool:
        """Return whether the function that is being read captures CUDA graphs."""
        names = self.traits_of(self.activations[-1].node).names
        return bool(names & {"CUDAGraph", "graph", "make_graphed_callables", "capture_begin"})

    def captures_by_hand(self) -> bool:
        """Return whether the function that is being read begins a capture itself: what is captured does not run yet."""
        return "capture_begin" in self.traits_of(self.activations[-1].node).names

    def read_entry(self, node: ast.FunctionDef | ast.AsyncFunctionDef, names: dict[str, Value]) -> None:
        """Read a function by itself, with what is known of its parameters."""
        self.frame.names = self.state.names = names
        self.functions.append(node.name)
        self._read_body(node, None)
        self.functions.pop()

    def at_yield(self, value: Value) -> None:
        """Run the body of a with statement where its generator yields."""
        activation = self.activations[-1]
        if activation.at_yield is None:
            self.maybe_waits("yield")  # whoever iterates goes on meanwhile
        elif not activation.yielded:
            activation.yielded = True
            activation.at_yield(value)

    def inline(self, function: Function, call: Call) -> Value:
        """Read a function of this file with arguments, and return what it returns."""
        return self._read_function(function, call)

    def _read_function(self, function: Function, call: Call, at_yield: Callable[[Value], None] | None = None) -> Value:
        node = function.node
        running = [one.node for one in self.activations]
        if node in self.cached:
            return self.cached[node]
        if node is None or node in running or (len(running) > _MOST_INLINED and not _is_cached(node)):
            self.maybe_waits()
            # two calls can well give the same stream, which then waits for itself without a word
            name = getattr(node, "name", "")
            return self.one_of_streams(Value(), name) if "stream" in name.lower() else Value()
        if is_kernel(node):
            return self.opaque(call)
        caller, names = self.frame, self.state.names
        current, guards, self.guards = self.state.current, self.guards, list(self.guards)
        self.frame = Frame(self._bound(function, call), function.frame)
        self.state.names = self.frame.names
        self.functions.append(getattr(node, "name", "lambda"))
        result = self._read_body(node, at_yield)
        self.functions.pop()
        self.frame, self.guards = caller, guards
        # what a with statement's body did to the caller's names, inside this function's yield, stays
        self.state.names = caller.names = caller.names if at_yield else names
        if "set_stream" not in self.traits_of(node).names:
            self.state.current = current
        if _is_cached(node):
            # one for each set of arguments: which of them are the same, the file does not say
            self.cached[node] = result = _settled(result) or result
        return result

    def _read_body(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        at_yield: Callable[[Value], None] | None,
    ) -> Value:
        """Read the body of the function whose frame is entered; the state is then that of its end."""
        self.activations.append(Activation(node, at_yield=at_yield))
        if isinstance(node, ast.Lambda):
            result = self.value(node.body)
            self.activations.pop()
            return result
        before = self.state.copy()
        signal = self.block(node.body)
        activation = self.activations.pop()
        ends = [state for state, _ in activation.returns]
        if not signal:
            ends.append(self.state)
            activation.returns.append((self.state, Const(value=None)))
        if ends:
            self.go(meet(before, ends))
        values = [value for _, value in activation.returns]
        self._end_of_function(node, values)
        if self.traits_of(node).generator:
            return Value()
        return either(*values) if values else Value()

    def _end_of_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, returned: list[Value]) -> None:
        """The function's own names go, all but what is returned."""
        own = {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        if self.traits_of(node).closures:
            return
        staying = [*returned, *(self.state.names.get(name) for name in own)]
        held = {id(one.storage) for value in staying for one in tensors_in(value)}
        last = node.body[-1]
        for name, value in list(self.state.names.items()):
            if name not in own and len(options(value)) == 1:
                for tensor in tensors_in(value):
                    if id(tensor.storage) not in held:
                        self._freed(tensor, last)

    def _bound(self, function: Function, call: Call) -> dict[str, Value]:
        """Return a function's parameters with their arguments."""
        node = function.node
        assert node is not None
        names: dict[str, Value] = {}
        positional = [*node.args.posonlyargs, *node.args.args]
        args = [function.owner, *call.args] if function.owner is not None else list(call.args)
        if any(isinstance(one, ast.Starred) for one in call.node.args):
            args = args[: 1 if function.owner is not None else 0]
        for parameter, value in zip(positional, args, strict=False):
            names[parameter.arg] = value or Value(parameter.arg)
        for parameter in (*positional, *node.args.kwonlyargs):
            if parameter.arg in call.keywords:
                names[parameter.arg] = call.keywords[parameter.arg]
        self._defaults(node, names)
        for rest in (node.args.vararg, node.args.kwarg):
            if rest is not None:
                names[rest.arg] = Value(rest.arg)
        if node.args.vararg is not None and len(args) > len(positional):
            names[node.args.vararg.arg] = Items(items=tuple(one or Value() for one in args[len(positional) :]))
        return names

    def _defaults(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, names: dict[str, Value]) -> None:
        positional = [*node.args.posonlyargs, *node.args.args]
        defaults = dict(
            zip(
                [one.arg for one in positional[len(positional) - len(node.args.defaults) :]],
                node.args.defaults,
                strict=True,
            )
        )
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        defaults |= {one.arg: default for one, default in pairs if default is not None}
        for parameter in (*positional, *node.args.kwonlyargs):
            if parameter.arg not in names:
                default = defaults.get(parameter.arg)
                known = isinstance(default, ast.Constant) and default.value is not None and self.activations[1:]
                names[parameter.arg] = self.value(default) if known else Value(parameter.arg)

    def class_attribute(self, cls: Class, name: str) -> Value | None:
        """Return what a class's methods set an attribute to, where that is one kind of thing."""
        if cls.node is None:
            return None
        if cls.node not in self.assignments:
            self.assignments[cls.node] = _attribute_assignments(cls.node)
        found = [right for target, right in self.assignments[cls.node] if target == name]
        calls = [right for right in found if not (isinstance(right, ast.Constant) and right.value is None)]
        if len(calls) != 1 or not isinstance(calls[0], ast.Call):
            return None
        return _settled(self._aside(calls[0], cls.frame))

    def _aside(self, node: ast.expr, outer: Frame | None) -> Value:
        """Evaluate an expression of somewhere else, leaving no trace of it."""
        state, frame, muted, loops = self.state, self.frame, self.muted, self.loops
        cuda, context = state.cuda, state.context
        self.muted, self.loops = True, []
        self.frame = Frame(outer=outer)
        self.state = state.copy()
        self.state.names = self.frame.names
        # objects are made where no side stream is current, wherever their attributes are asked for
        self.state.current = self.ambient
        self.activations.append(Activation(node))
        try:
            return self.value(node)
        finally:
            self.activations.pop()
            self.state, self.frame, self.muted, self.loops = state, frame, muted, loops
            self.state.cuda, self.state.context = cuda, context


def _settled(value: Value) -> Value | None:
    """Return a value as it is long after it was made; None for what may have changed since."""
    if isinstance(value, (Stream, Event, Module, Loader, Instance)):
        return value
    if isinstance(value, Tensor):
        return Tensor(device=value.device, pinned=value.pinned)
    return None


def _attribute_assignments(cls: ast.ClassDef) -> list[tuple[str, ast.expr]]:
    """Return what a class's methods assign to attributes of `self`."""
    found = []
    for node in ast.walk(cls):
        targets: list[ast.expr] = []
        right = None
        if isinstance(node, ast.Assign):
            targets, right = node.targets, node.value
        elif isinstance(node, ast.AnnAssign):
            targets, right = [node.target], node.value
        for target in targets:
            if isinstance(target, ast.Attribute) and text_of(target.value) == "self" and right is not None:
                found.append((target.attr, right))
    return found


def _is_cached(node: ast.AST) -> bool:
    """Return whether a function gives what it gave before (`functools.cache`)."""
    return any(
        text_of(one).removesuffix("()").rpartition(".")[2] in ("cache", "lru_cache", "cached", "memoize")
        for one in getattr(node, "decorator_list", [])
    )


def is_kernel(node: ast.AST) -> bool:
    """Return whether a function is device code (Triton, Numba): Python's meaning is not its meaning."""
    decorators = [text_of(one) for one in getattr(node, "decorator_list", [])]
    return any(
        one.removesuffix("()").rpartition(".")[2] in ("jit", "kernel", "autotune", "heuristics") for one in decorators
    )
