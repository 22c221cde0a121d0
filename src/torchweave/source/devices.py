"""IDEA: what `torch.cuda` does: streams, contexts, synchronization."""

from __future__ import annotations

import ast
from collections.abc import Callable

from torchweave.source.facts import (
    CacheEmptied,
    NoSuchCall,
    StreamMade,
)
from torchweave.source.run import Call, Run
from torchweave.source.torch_names import CUDA, INSTEAD
from torchweave.source.values import (
    Const,
    Event,
    Stream,
    StreamContext,
    Value,
)


def stream(run: Run, made: Call) -> Value:
    """Make a stream."""
    run.uses_cuda(made.node)
    place = run.place(made.node)
    device = made.given(0, "device")
    of_device = device is not None and not isinstance(device, Const) and type(device) is Value
    run.note(StreamMade(place, kept=run.stores(made.node), of_device=of_device, for_capture=run.captures_graphs()))
    if "non_blocking" in made.keywords or "blocking" in made.keywords:
        why = "`torch.cuda.Stream` has no argument of that name: its streams never block on the default stream."
        run.note(NoSuchCall(place, why, "side = torch.cuda.Stream()", sure=True))
    return Stream("torch.cuda.Stream()", made=place, many=bool(run.loops))


def event(run: Run, made: Call) -> Value:
    """Make an event."""
    run.uses_cuda(made.node, context=False)
    return Event()


def _current(run: Run, made: Call) -> Value:
    run.uses_cuda(made.node)
    return run.state.current or Value("torch.cuda.current_stream()")


def _default(run: Run, made: Call) -> Value:
    run.uses_cuda(made.node)
    return run.ambient


def _context(run: Run, made: Call) -> Value:
    run.uses_cuda(made.node)
    return StreamContext(inner=run.as_stream(made.given(0, "stream")))


def _set_stream(run: Run, made: Call) -> Value:
    run.uses_cuda(made.node)
    run.state.current = run.as_stream(made.given(0, "stream"))
    return Value()


def _synchronize(run: Run, made: Call) -> Value:
    run.uses_cuda(made.node)
    argument = made.given(0, "device")
    if isinstance(argument, Stream):
        text = argument.text or "side"
        why = f"`torch.cuda.synchronize` takes a device, and `{text}` is a stream."
        run.note(NoSuchCall(run.place(made.node), why, f"{text}.synchronize()", sure=True))
    run.host_wait(made.node, "torch.cuda.synchronize()", explicit=True)
    return Value()


def _empty_cache(run: Run, made: Call) -> Value:
    run.uses_cuda(made.node, context=False)
    run.note(CacheEmptied(run.place(made.node)))
    run.state.host_wait(None, run.now)
    return Value()


def _makes_context(run: Run, made: Call) -> Value:
    run.uses_cuda(made.node)
    return Value()


def _external(run: Run, made: Call) -> Value:
    return Stream("torch.cuda.ExternalStream(pointer)")


def _is_asked_for(run: Run, name: str) -> bool:
    """Return whether the file asks if there is such a name, or a condition around does."""
    if name in run.facts.asked_for:
        return True
    asked = [node for test in run.guards for node in ast.walk(test)]
    return any(isinstance(node, ast.Constant) and node.value == name for node in asked) or any(
        getattr(node, "id", "") == "on_error" for node in asked
    )


def other(run: Run, name: str, made: Call) -> Value:
    """Do what any other function of `torch.cuda` does, if there is one of its name."""
    run.uses_cuda(made.node, context=False)
    if name in CUDA or name.startswith("_") or _is_asked_for(run, name):
        return Value()
    instead = INSTEAD.get(name, "")
    run.note(NoSuchCall(run.place(made.node), f"torch has no `torch.cuda.{name}`.", instead, sure=name in INSTEAD))
    return Value()


HANDLERS: dict[str, Callable[[Run, Call], Value]] = {
    "Stream": stream,
    "ExternalStream": _external,
    "get_stream_from_external": _external,
    "Event": event,
    "stream": _context,
    "StreamContext": _context,
    "current_stream": _current,
    "default_stream": _default,
    "set_stream": _set_stream,
    "synchronize": _synchronize,
    "empty_cache": _empty_cache,
    "init": _makes_context,
    "set_device": _makes_context,
    "mem_get_info": _makes_context,
}
