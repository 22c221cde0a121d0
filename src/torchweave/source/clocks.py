"""IDEA: readings of host clocks, and what lies between two of them."""

from __future__ import annotations

import ast

from torchweave.source.facts import ClockPair
from torchweave.source.run import Run
from torchweave.source.values import Clock, Value, options


def read(run: Run, node: ast.expr) -> Clock:
    """Read a host clock."""
    for loop in run.loops:
        loop.measured = True
        loop.awaited |= loop is run.loops[-1]
    at, pending = run.tick(), tuple(run.state.pending)
    place, awaited = run.place(node), run.state.awaited
    return Clock(at=at, place=place, pending=pending, opaque=run.opaque_calls, awaited=awaited)


def subtract(run: Run, second: Value, first: Value) -> None:
    """Tell where a difference of clock readings encloses work that nobody waited for."""
    firsts = [one for one in options(first) if isinstance(one, Clock)]
    seconds = [one for one in options(second) if isinstance(one, Clock)]
    if not firsts or not seconds or run.without_cuda:
        return
    begin, end = max(firsts, key=lambda one: one.at), max(seconds, key=lambda one: one.at)
    launches = [one for one in end.pending if one.at > begin.at]
    if not launches or begin.place is None or end.place is None:
        return
    if end.awaited > begin.at:
        return  # work between the readings was waited for: what comes after it may be next to nothing
    known = [one for one in launches if one.device == "cuda"]
    # calls into other files between the readings: most of the time may be theirs
    alone = begin.opaque == end.opaque
    if not known and not (run.state.cuda and alone):
        return
    last = max(known or launches, key=lambda one: one.at)
    sure = bool(known) and alone
    run.note(ClockPair(end.place, begin.place.line, last.place.line, sure, label(run)))


def label(run: Run) -> str:
    """Return what the statement that is being read puts its value into, in its own words."""
    if isinstance(run.statement, ast.Assign):
        targets = run.statement.targets
    elif isinstance(run.statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [run.statement.target]
    else:
        return ""
    words = []
    for node in (part for target in targets for part in ast.walk(target)):
        for word in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "value", None)):
            words += [word] if isinstance(word, str) else []
    return " ".join(words)
