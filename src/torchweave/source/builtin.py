"""IDEA: what Python's own functions do to tensors."""

from __future__ import annotations

from collections.abc import Callable

from torchweave.source.run import Call, Run
from torchweave.source.values import (
    Const,
    Tensor,
    Value,
)


def _print(run: Run, made: Call) -> Value:
    for value in made.args:
        if isinstance(value, Tensor):
            run.download(made.node, value, "printing a tensor")
    return Value()


def _number(run: Run, made: Call) -> Value:
    if len(made.args) == 1 and isinstance(made.args[0], Tensor):
        run.download(made.node, made.args[0], f"{made.name}() of a tensor")
    return Value()


def _pass_on(run: Run, made: Call) -> Value:
    """The value of what passes its argument on: lists of streams, iterators over them."""
    return made.args[0] if made.args else Value()


def _text(run: Run, made: Call) -> Value:
    given = made.args[0] if made.args else None
    return Const(value=str(given.value)) if isinstance(given, Const) else Value()


def builtin(run: Run, name: str, made: Call) -> Value | None:
    """Do what a builtin function does; None where it is none that matters."""
    handler = _BUILTINS.get(name)
    return handler(run, made) if handler else None


_BUILTINS: dict[str, Callable[[Run, Call], Value]] = {
    "print": _print,
    "float": _number,
    "int": _number,
    "bool": _number,
    "str": _text,
    "list": _pass_on,
    "tuple": _pass_on,
    "iter": _pass_on,
    "reversed": _pass_on,
}
