"""IDEA: where reading begins: with the file's own statements, and then with every function by itself.

A function is read by itself, with parameters of which nothing is known, and again wherever this file calls it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchweave.source.facts import Facts
from torchweave.source.functions import Activation, is_kernel
from torchweave.source.state import State
from torchweave.source.statements import Statements
from torchweave.source.values import Class, Frame, Instance, Stream, Value

# names without which there is nothing to find in a function, nor in the functions that it calls
TRIGGERS = frozenset(
    "stream Stream streams current_stream default_stream set_stream StreamContext cuda synchronize wait_stream "
    "wait_event record_event record_stream empty_cache pin_memory non_blocking async_op environ putenv time "
    "perf_counter monotonic time_ns perf_counter_ns monotonic_ns default_timer timeit repeat Event Timer "
    "ExternalStream enter_context".split()
)


def read_file(tree: ast.Module) -> Facts:
    """Return what happens in a file, as far as its source shows."""
    facts = Facts(asked_for=_asked_for(tree))
    ambient = Stream("", ambient=True)
    several = Stream("")
    frame = Frame()
    run = Statements(facts, State(ambient, several), frame, ambient)
    run.activations, run.assignments, run.traits, run.methods, run.cached = [Activation(tree)], {}, {}, {}, {}
    frame.names = run.state.names
    run.block(tree.body)
    globals_ = frame
    globals_.names = run.state.names
    wanted = _wanted(tree)
    for function, cls in _functions(tree.body, None):
        if function.name in wanted and not is_kernel(function):
            run.now += 1
            _read_entry(run, function, cls, globals_)
    return facts


def _read_entry(
    run: Statements, node: ast.FunctionDef | ast.AsyncFunctionDef, cls: ast.ClassDef | None, outer: Frame
) -> None:
    """Read one function as an entry."""
    run.steps_left -= run.steps
    if run.steps_left <= 0:
        return
    run.steps = run.depth = 0
    run.without_cuda = False
    run.frame = Frame(outer=outer)
    run.state = State(run.ambient, run.state.several, names=run.frame.names)
    # whatever the file made before is long done
    run.state.host[None] = run.began = run.now
    run.loops, run.guards, run.functions = [], [], []
    run.activations = [Activation(ast.Module(body=[], type_ignores=[]))]
    owner = None
    if cls is not None:
        known = outer.names.get(cls.name)
        owned = known if isinstance(known, Class) and known.node is cls else Class(cls.name, node=cls, frame=outer)
        owner = Instance("self", cls=owned)
        if any(getattr(one, "id", "") == "staticmethod" for one in node.decorator_list):
            owner = None
    names = {arg.arg: Value(arg.arg) for arg in _all_parameters(node)}
    first = (*node.args.posonlyargs, *node.args.args)[:1]
    if owner is not None and first:
        owner.text = first[0].arg
        names[first[0].arg] = owner
    run.read_entry(node, names)


def _all_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.arg]:
    yield from (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    for one in (node.args.vararg, node.args.kwarg):
        if one is not None:
            yield one


def _functions(
    body: list[ast.stmt], cls: ast.ClassDef | None
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    """Yield the functions of a block, and of what is inside it, with the class that they are methods of."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, cls
            yield from _functions(node.body, None)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, node)
        else:
            for field in ("body", "orelse", "finalbody"):
                inner = getattr(node, field, [])
                yield from _functions([one for one in inner if isinstance(one, ast.stmt)], cls)
            for handler in getattr(node, "handlers", []):
                yield from _functions(handler.body, cls)


def _asked_for(tree: ast.Module) -> frozenset[str]:
    """Return the names that a file asks for before it uses them: other versions have them."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1]
    asked = [node.args[1] for node in calls if getattr(node.func, "id", "") in ("hasattr", "getattr")]
    return frozenset(node.value for node in asked if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _wanted(tree: ast.Module) -> set[str]:
    """Return the names of functions in which, or in whose calls, something can be found."""
    triggers = set(TRIGGERS)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for one in node.names:
                if one.asname or module.startswith("torch.cuda"):
                    path = f"{module}.{one.name}"
                    if path.rpartition(".")[2] in triggers or "cuda" in path:
                        triggers.add(one.asname or one.name)
    used: dict[str, set[str]] = {}
    for function, _ in _functions(tree.body, None):
        names = used.setdefault(function.name, set())
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                names.add(node.arg)
    wanted = {name for name, names in used.items() if names & triggers}
    while True:
        more = {name for name, names in used.items() if name not in wanted and names & wanted}
        if not more:
            return wanted
        wanted |= more
