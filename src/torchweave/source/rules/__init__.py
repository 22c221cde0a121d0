"""IDEA: one rule a module, for one cause; its docstring is its documentation. Rules read facts, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from torchweave.source.facts import Facts, Place
from torchweave.source.finding import Certainty

# the order of the documentation
NAMES = (
    "timed_without_sync",
    "backward_on_forward_stream",
    "missing_wait",
    "host_sync",
    "explicit_sync",
    "wide_dependency",
    "pageable_copy",
    "pinned_alloc",
    "device_alloc",
    "stream_alias",
    "max_connections",
    "launch_blocking",
    "no_such_call",
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule yields: a finding without its file.

    Attributes:
        node: The place.
        why: Why, in one sentence.
        mend: The mend as code.
        certainty: `shown` or `likely`.
    """

    node: ast.expr | ast.stmt
    why: str
    mend: str
    certainty: Certainty = "shown"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: the cause that it finds, its page, and how it finds it."""

    cause: str
    page: str
    find: Callable[[Facts], Iterator[Found]]


def rule(name: str) -> Rule:
    """Return the rule of a cause."""
    module = import_module(f"{__name__}.{name}")
    return Rule(name, (module.__doc__ or "").strip(), module.find)


def all_rules() -> tuple[Rule, ...]:
    """Return all rules in the order of the documentation."""
    return tuple(rule(name) for name in NAMES)


def certainty(sure: bool) -> Certainty:
    """Return the word for how certain something is."""
    return "shown" if sure else "likely"


def on(stream: str) -> str:
    """Return a stream in words."""
    return f"stream `{stream}`" if stream else "the surrounding stream"


def among_streams(place: Place) -> bool:
    """Return whether a place is in every turn of a loop that uses side streams, or of a loop inside it."""
    near = [loop for loop in place.loops if place.depth - loop.depth <= 1 and not loop.display]
    return any(loop.streams for loop in near) and not place.guards
