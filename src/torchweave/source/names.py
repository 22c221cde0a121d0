"""IDEA: what names mean: assignments, loops' variables, and names that go while their memory is in use."""

from __future__ import annotations

import ast
import re

from torchweave.source import environment
from torchweave.source.expressions import Expressions, text_of
from torchweave.source.facts import FreedEarly, Loop
from torchweave.source.run import Call
from torchweave.source.values import (
    Choice,
    Dotted,
    Items,
    Loader,
    Stream,
    Tensor,
    Value,
    Write,
    either,
    options,
    tensors_in,
)

# what goes over the parts of a mapping or model
_PARTS = frozenset(
    ["items", "keys", "values", "parameters", "named_parameters", "modules", "named_modules", "children"]
)
# what hands on the items that it is given
_WRAPPERS = frozenset(["enumerate", "tqdm", "trange", "track", "zip", "reversed", "list", "sorted", "islice"])
_PART_OF_MODEL = re.compile(r"(^|[._])(layers|blocks|modules|experts|shards|stages)$")


class Names(Expressions):
    """Assigns names, attributes and items."""

    def assign(self, target: ast.expr, value: Value) -> None:
        """Assign a value to a target."""
        if isinstance(target, ast.Name):
            self._drop(target.id, target, instead=value)
            self._name_it(value, target.id)
            self.state.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, Value())
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            self._assign_part(target, value)

    @staticmethod
    def _name_it(value: Value, name: str) -> None:
        unnamed = not value.text or (isinstance(value, Stream) and not value.text.isidentifier() and not value.ambient)
        if unnamed and not isinstance(value, Choice) and not (isinstance(value, Stream) and value.ambient):
            value.text = name

    def _unpack(self, target: ast.Tuple | ast.List, value: Value) -> None:
        if isinstance(value, Choice) and all(
            isinstance(one, Items) and not one.keys and len(one.items) == len(target.elts) for one in value.options
        ):
            rows = [one.items for one in value.options if isinstance(one, Items)]
            value = Items(items=tuple(either(*column) for column in zip(*rows, strict=True)))
        plain = isinstance(value, Items) and not value.keys and len(value.items) == len(target.elts)
        starred = any(isinstance(one, ast.Starred) for one in target.elts)
        for position, one in enumerate(target.elts):
            if plain and isinstance(value, Items) and not starred:
                self.assign(one, value.items[position])
            elif isinstance(value, (Tensor, Choice)) and any(True for _ in tensors_in(value)):
                self.assign(one, value)
            elif isinstance(value, Items):
                self.assign(one, self.element_of(value))
            else:
                self.assign(one, self.attribute(value, f"[{position}]", text_of(one)))

    def _assign_part(self, target: ast.Attribute | ast.Subscript, value: Value) -> None:
        base = self.value(target.value)
        self.keep(value)
        if isinstance(target, ast.Attribute):
            key = target.attr
        else:
            index = self.value(target.slice)
            if isinstance(base, Dotted) and base.path == "os.environ":
                node = ast.copy_location(ast.Call(func=target, args=[], keywords=[]), target)
                environment.set_variable(self, Call(node, "", base, [], {}, starred=False), index, value)
                return
            if isinstance(base, Tensor):
                # x[i] = y writes into x
                self.wrote(base, self.launch(target, [base, value]))
                return
            key = f"[{text_of(target.slice)}]"
        if isinstance(base, Dotted) or key == "[]":
            return
        self._name_it(value, text_of(target))
        self.state.heap[base, key] = value

    def _drop(self, name: str, node: ast.expr | ast.stmt, instead: Value | None = None) -> None:
        """A name stops meaning its value: tell if another stream may still use the memory."""
        old = self.state.names.get(name)
        if old is None or old is instead:
            return
        held = {id(one.storage) for one in tensors_in(instead)}
        for other, value in self.state.names.items():
            if other != name:
                held |= {id(one.storage) for one in tensors_in(value)}
        for tensor in tensors_in(old):
            if id(tensor.storage) not in held and len(options(old)) == 1:
                self._freed(tensor, node)

    def _freed(self, tensor: Tensor, node: ast.expr | ast.stmt) -> None:
        storage = tensor.storage
        write = self.state.last_write(storage)
        if storage.kept or storage.told or write is None or tensor.device == "cpu":
            return
        home = write.stream
        if not home.ambient:
            return  # a side stream's next work begins with a wait for the surrounding one, as a rule
        for user, (at, place) in storage.uses.items():
            if user is not home and not self.state.visible(Write(user, at, place), home):
                storage.told = True
                self.note(FreedEarly(place, tensor.text, home.text, user.text, node.lineno))

    def bind_iteration(self, target: ast.expr, iterable: ast.expr) -> Loop:
        """Bind a loop's target to what it goes over, and return the loop."""
        source = self.value(iterable)
        loop = Loop(
            iterable,
            count=_count(iterable),
            display=isinstance(iterable, (ast.Tuple, ast.List)),
            mapping=_is_over_parts(iterable),
            depth=len(self.functions),
        )
        element = self._element(source, iterable)
        self.assign(target, element)
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                bound = self.state.names.get(name.id)
                if type(bound) is Value:
                    bound.many = True
        return loop

    def _element(self, source: Value, iterable: ast.expr) -> Value:
        loaders = [one for one in options(source) if isinstance(one, Loader)]
        if isinstance(iterable, ast.Call) and text_of(iterable.func) in ("enumerate", "tqdm", "zip", "tqdm.tqdm"):
            inner = [self._element(self.value(one), one) for one in iterable.args[:4]]
            if text_of(iterable.func) == "enumerate" and inner:
                return Items(items=(Value(), inner[0]))
            return Items(items=tuple(inner)) if text_of(iterable.func) == "zip" else (inner[0] if inner else Value())
        if loaders:
            pinned = loaders[0].pinned
            batch = Tensor("batch", device="cpu", pinned=pinned)
            return batch if pinned is not None else Value("batch")
        if isinstance(source, Tensor):
            return source
        return self.element_of(source)


def _is_over_parts(iterable: ast.expr) -> bool:
    """Return whether a loop goes over a mapping's or model's parts, whatever counts or shows them meanwhile."""
    if isinstance(iterable, ast.Call):
        name = text_of(iterable.func).rpartition(".")[2]
        if name in _PARTS:
            return True
        if name == "range":
            sizes = [one for one in iterable.args if isinstance(one, ast.Call) and text_of(one.func) == "len"]
            return any(_is_over_parts(one.args[0]) for one in sizes if one.args)
        return name in _WRAPPERS and any(_is_over_parts(one) for one in iterable.args)
    return _PART_OF_MODEL.search(text_of(iterable)) is not None


def _count(iterable: ast.expr) -> int | None:
    """Return how often a loop over something runs, where that is written there."""
    if isinstance(iterable, (ast.Tuple, ast.List)):
        return len(iterable.elts)
    if isinstance(iterable, ast.Call) and text_of(iterable.func) == "range":
        numbers = [one.value for one in iterable.args if isinstance(one, ast.Constant)]
        whole = [one for one in numbers if isinstance(one, int)]
        if len(whole) == len(iterable.args) and 0 < len(whole) < 4 and 0 not in whole[2:]:
            return len(range(*whole))
    return None
