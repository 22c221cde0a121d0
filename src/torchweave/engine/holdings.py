"""IDEA: what modules, and the plain objects around them, hold at one moment: to see what a strand leaves changed.

A dispatcher that keeps its routing on an object, a buffer that is bound anew, weights that are swapped for a call: two
strands that run one module in turns would see each other's. Seen is what a module reaches: its attributes, parameters
and buffers, plain objects, dicts and lists among them or among the globals of its `forward`, two levels deep.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

Mark: TypeAlias = tuple[Any, ...]
Holder: TypeAlias = tuple[str, Mapping[Any, Any]]

_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 2
_MAX_ITEMS = 256
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


class Holdings:
    """The holders that some modules reach, and what each held when it was noted last.

    Args:
        modules: The modules, without those inside them.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._holders: dict[int, Holder] = {}
        self._noted: dict[int, dict[Any, Mark]] = {}
        # identities mean something only while what they belong to lives
        self._alive: list[Any] = []
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """Note what a module holds now."""
        for name, holder in _holders(module):
            if id(holder) not in self._holders:
                self._holders[id(holder)] = (name, holder)
                self._note(id(holder))

    def note(self) -> None:
        """Note what everything holds now."""
        for key in self._holders:
            self._note(key)

    def changed(self) -> str:
        """Return the name of something that is not as it was noted, or ""."""
        for key, (name, holder) in self._holders.items():
            before, now = self._noted[key], _marks(holder)
            for item in before.keys() | now.keys():
                if before.get(item) != now.get(item):
                    return f"{item!r} of a {name}"
        return ""

    def _note(self, key: int) -> None:
        holder = self._holders[key][1]
        self._noted[key] = _marks(holder)
        self._alive.extend(holder.values())


class _ListHolder(Mapping[int, Any]):
    """A list as a mapping from its positions."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __getitem__(self, key: int) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[int]:
        return iter(range(min(len(self._items), _MAX_ITEMS)))

    def __len__(self) -> int:
        return min(len(self._items), _MAX_ITEMS)


def _marks(holder: Mapping[Any, Any]) -> dict[Any, Mark]:
    items = list(itertools.islice(holder.items(), _MAX_ITEMS))
    return {key: _mark(value) for key, value in items if key not in _MACHINERY}


def _mark(value: Any) -> Mark:
    """Return something that differs where the value was replaced or written to."""
    if isinstance(value, torch.Tensor):
        version = -1 if value.is_inference() else value._version
        pointer = value.data_ptr() if type(value) in (torch.Tensor, nn.Parameter) else 0
        return (id(value), version, pointer, value.requires_grad)
    if isinstance(value, torch.Generator):
        return (id(value), bytes(value.get_state().tolist()))
    if isinstance(value, _SCALARS):
        return (type(value), value)
    return (id(value),)


def _holders(module: nn.Module) -> Iterator[Holder]:
    name = type(module).__name__
    yield name, vars(module)
    yield name, module._parameters
    yield name, module._buffers
    for key, value in list(vars(module).items()):
        if key not in _MACHINERY:
            yield from _inside(type(value).__name__, value, _DEPTH)
    forward = getattr(type(module).forward, "__code__", None)
    variables = getattr(type(module).forward, "__globals__", {})
    for variable in forward.co_names if forward is not None else ():
        yield from _inside(variable, variables.get(variable), _DEPTH)


def _inside(name: str, value: Any, depth: int) -> Iterator[Holder]:
    """Yield a plain container or object, and those in it."""
    if depth == 0 or isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType | types.FunctionType):
        return
    if isinstance(value, list):
        holder: Mapping[Any, Any] = _ListHolder(value)
    elif isinstance(value, dict):
        holder = value
    elif type(value).__module__.partition(".")[0] not in ("builtins", "torch") and hasattr(value, "__dict__"):
        holder = vars(value)
    else:
        return
    yield name, holder
    for item in list(itertools.islice(holder.values(), _MAX_ITEMS)):
        yield from _inside(type(item).__name__, item, depth - 1)
