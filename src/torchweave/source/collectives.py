"""IDEA: what `torch.distributed` does, and the handles that it gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from torchweave.source import streams
from torchweave.source.facts import (
    AwaitedAtOnce,
)
from torchweave.source.run import Call, Run
from torchweave.source.values import (
    Const,
    Items,
    Tensor,
    Value,
    Work,
    tensors_in,
)
from torchweave.source.words import (
    COLLECTIVES,
)


def distributed(run: Run, name: str, made: Call) -> Value:
    """Do what a function of `torch.distributed` does."""
    if name not in COLLECTIVES:
        if name == "init_process_group" or name.startswith(("get_", "is_", "new_")):
            return Value()
        return run.opaque(made)
    if name == "barrier":
        run.maybe_waits("barrier")
        return Value()
    tensors = [tensor for value in made.values for tensor in tensors_in(value)]
    if _is_between_hosts(made, tensors):
        return Value()
    for tensor in tensors:
        run.read(tensor, made.node)
    asynchronous = made.keywords.get("async_op")
    if isinstance(asynchronous, Const) and asynchronous.value is True:
        run.keep(Items(items=tuple(made.values)))
        at, before, run.last_collective = run.tick(), run.last_collective, run.now
        # several in a row are waited for together
        return Work(call=name, place=run.place(made.node), at=at if before != at - 1 else -1)
    if name in ("isend", "irecv"):
        return Value("work")
    run.launch(made.node, [])
    return Value()


def _is_between_hosts(made: Call, tensors: Sequence[Tensor]) -> bool:
    """Return whether a call visibly moves no device's memory: its tensors are the CPU's, or its group is."""
    group = made.keywords.get("group")
    named = group is not None and re.search(r"(^|[._])(cpu|gloo)(_|$)", group.text.lower()) is not None
    return named or (bool(tensors) and all(tensor.device == "cpu" for tensor in tensors))


def of_work(run: Run, work: Value, made: Call) -> Value:
    """Do what a method of a collective's handle does."""
    if made.name != "wait":
        return Value()
    if isinstance(work, Work) and _is_at_once(run, work, made):
        run.note(AwaitedAtOnce(run.place(made.node), work.place.line if work.place else 0, work.call))
    return wait_for_all(run, work, made)


def _is_at_once(run: Run, work: Work, made: Call) -> bool:
    """Return whether a wait comes right after its collective, and stops the surrounding stream."""
    place, current = run.place(made.node), run.state.current
    if work.place is None or run.now != work.at or made.args or made.keywords:
        return False
    # whether there is a handle may be asked; any other condition means that not everybody waits
    inside = place.guards[len(work.place.guards) :]
    asked = all(any(getattr(one, "id", None) == work.text for one in ast.walk(test)) for test in inside)
    return asked and place.loops == work.place.loops and current is not None and current.ambient


def wait_for_all(run: Run, receiver: Value, made: Call) -> Value:
    """The wait of something unknown, perhaps of a collective: the current stream, if not all, has waited."""
    if run.state.events.get(receiver) is not None:
        return streams.event_wait(run, receiver, made)
    for stream in run.known_streams():
        run.state.wait(stream, None, run.tick())
    run.state.pending.clear()
    return Value()
