"""IDEA: what a callable can reach: its code, the modules and the tensors in its closure, arguments and globals."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_MAX_ITEMS = 256


def reachable(root: Any, *, depth: int, attributes: bool) -> Iterator[Any]:
    """Yield code objects, modules and tensors that a callable holds, in an order that depends on it alone.

    Args:
        root: A callable.
        depth: How many containers and functions deep to look.
        attributes: Whether to look into the attributes of plain objects too (slow; for the first pair of a kind).
    """
    yield from _walk(root, depth, attributes, set())


def _walk(value: Any, depth: int, attributes: bool, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, torch.Tensor | nn.Module):
        yield value
        return
    if depth < 0 or id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value, attributes):
        if isinstance(part, types.CodeType):
            yield part
        else:
            yield from _walk(part, depth - 1, attributes, seen)


def _parts(value: Any, attributes: bool) -> Iterator[Any]:
    """Yield what a value directly holds."""
    if isinstance(value, types.FunctionType):
        yield value.__code__
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue  # a variable that has no value yet
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        variables = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (variable for variable in variables if _is_variable(variable))
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, torch.Tensor):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        yield from itertools.islice(items, _MAX_ITEMS)
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type | types.ModuleType):
        if callable(value):
            yield type(value).__call__
        if attributes or callable(value):
            yield from list(vars(value).values())[:_MAX_ITEMS]


def _is_variable(value: Any) -> bool:
    """Whether a global is worth looking into."""
    return not isinstance(value, type | types.ModuleType | types.BuiltinFunctionType)
