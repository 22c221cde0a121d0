"""IDEA: environment variables that are set."""

from __future__ import annotations

from torchweave.source.facts import (
    EnvironmentSet,
)
from torchweave.source.run import Call, Run
from torchweave.source.values import (
    Const,
    Items,
    Value,
)


def put(run: Run, made: Call) -> Value:
    """Do what `os.putenv(name, value)` and `os.environ.setdefault` do."""
    set_variable(run, made, made.given(0, "key"), made.given(1, "value"))
    return Value()


def update(run: Run, made: Call) -> Value:
    """Do what `os.environ.update(...)` does."""
    for key, value in made.keywords.items():
        set_variable(run, made, Const(value=key), value)
    for given in made.args[:1]:
        if isinstance(given, Items):
            for name, value in zip(given.keys, given.items, strict=False):
                set_variable(run, made, Const(value=name), value)
    return Value()


def set_variable(run: Run, where: Call, key: Value | None, value: Value | None) -> None:
    """Tell that an environment variable is set."""
    if not isinstance(key, Const) or not isinstance(key.value, str):
        return
    # str(1) is as good as "1"
    known = str(value.value) if isinstance(value, Const) else None
    run.note(EnvironmentSet(run.place(where.node), key.value, known, run.state.context))
