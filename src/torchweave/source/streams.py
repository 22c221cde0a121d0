"""IDEA: what the methods of streams and events do, and which they do not have."""

from __future__ import annotations

import re
from collections.abc import Callable

from torchweave.source.facts import (
    HostRead,
    HostWait,
    NoSuchCall,
    SelfWait,
)
from torchweave.source.run import Call, Run
from torchweave.source.torch_names import EVENT, INSTEAD_EVENT, INSTEAD_STREAM, STREAM
from torchweave.source.values import (
    Const,
    Dotted,
    Event,
    Stream,
    StreamContext,
    Value,
    options,
)


def refuse_stream_keyword(run: Run, name: str, made: Call) -> None:
    """Operations have no argument for a stream: they run on the current one."""
    if "stream" in made.keywords and run.as_stream(made.keywords["stream"]) is not None:
        text = made.keywords["stream"].text or "side"
        why = f"`{name}` has no argument `stream`: operations run on the current stream."
        run.note(NoSuchCall(run.place(made.node), why, f"with torch.cuda.stream({text}): ...", sure=True))


def of_stream(run: Run, stream: Value, made: Call) -> Value:
    """Do what a method of a stream does."""
    handler = _STREAM_METHODS.get(made.name)
    if handler is not None:
        return handler(run, stream, made) or Value()
    if isinstance(stream, Stream) and made.name not in STREAM and not made.name.startswith("_"):
        text = stream.text or "side"
        instead = INSTEAD_STREAM.get(made.name, "").replace("side", text)
        sure = stream.made is not None or stream.ambient
        why = f"A stream of torch has no method `{made.name}`."
        run.note(NoSuchCall(run.place(made.node), why, instead, sure=sure))
    return Value()


def of_event(run: Run, event: Value, made: Call) -> Value:
    """Do what a method of an event does."""
    handler = _EVENT_METHODS.get(made.name)
    if handler is not None:
        return handler(run, event, made) or Value()
    if made.name not in EVENT and not made.name.startswith("_"):
        text = event.text or "event"
        instead = re.sub(r"\bevent\b", text, INSTEAD_EVENT.get(made.name, ""))
        why = f"An event of torch has no method `{made.name}`."
        run.note(NoSuchCall(run.place(made.node), why, instead, sure=True))
    return Value()


def wait_stream(run: Run, receiver: Value, made: Call) -> Value:
    """Let a stream wait for another."""
    run.uses_cuda(made.node)
    run.uses_streams()
    waiters, awaited = _streams(run, receiver), _streams(run, made.given(0, "stream"))
    first = waiters[0]
    if waiters == awaited and len(waiters) == 1 and first is not None:
        if not first.ambient and first is run.state.current:
            run.note(SelfWait(run.place(made.node), first.text))
            run.state.wait(first, None, run.tick())  # it is told once, and not again at every use
        return Value()
    now = run.tick()
    for waiter in waiters:
        for other in awaited:
            run.state.wait(waiter, other, now)
    return Value()


def _streams(run: Run, value: Value | None) -> list[Stream | None]:
    """Return the streams that a value can be: one of several is taken for all of them in turn."""
    found = [run.as_stream(one) for one in options(value)] or [None]
    return [*run.known_streams(), None] if None in found else found


def wait_event(run: Run, receiver: Value, made: Call) -> Value:
    """Let a stream wait for an event."""
    run.uses_cuda(made.node)
    run.uses_streams()
    _await(run, _streams(run, receiver), made.given(0, "event") or Value())
    return Value()


def _await(run: Run, waiters: list[Stream | None], event: Value) -> None:
    now = run.tick()
    for waiter in waiters:
        for one in options(event):
            run.state.wait_event(waiter, one, now)


def record_event(run: Run, receiver: Value, made: Call) -> Value:
    """Record an event on a stream, and return it."""
    run.uses_cuda(made.node)
    given = made.given(0, "event")
    event = given if given is not None and not isinstance(given, Const) else Event()
    run.state.record(event, run.as_stream(receiver), run.tick())
    return event


def record(run: Run, receiver: Value, made: Call) -> Value:
    """Record an event on the current stream, or on one that is given."""
    stream = made.given(0, "stream")
    on = run.as_stream(stream) if stream is not None and not isinstance(stream, Const) else run.state.current
    run.state.record(receiver, on, run.tick())
    return Value()


def event_wait(run: Run, receiver: Value, made: Call) -> Value:
    """Let the current stream, or one that is given, wait for an event."""
    run.uses_streams()
    stream = made.given(0, "stream")
    given = stream is not None and not isinstance(stream, Const)
    _await(run, _streams(run, stream) if given else [run.state.current], receiver)
    return Value()


def _stream_synchronize(run: Run, receiver: Value, made: Call) -> Value:
    run.uses_cuda(made.node)
    stream = run.as_stream(receiver)
    text = (receiver.text or "stream") if not (stream and stream.ambient) else "torch.cuda.current_stream()"
    if stream is None:
        run.state.host_wait(None, run.now)
    else:
        run.host_wait(made.node, f"{text}.synchronize()", stream, explicit=True)
    return Value()


def _event_synchronize(run: Run, receiver: Value, made: Call) -> Value:
    stream, _ = run.state.events.get(receiver, (None, {}))
    awaited = [one for one in run.state.pending if stream is not None and one.stream is stream]
    idle = all(one.copy for one in awaited)  # nothing known, or so that the host can read
    how = f"{receiver.text or 'event'}.synchronize()"
    run.note(HostWait(run.place(made.node), how, explicit=True, sure=True, idle=idle))
    run.state.host_wait_event(receiver, run.now)
    return Value()


def synchronize(run: Run, receiver: Value, made: Call) -> Value:
    """A `synchronize()` of something: a stream's or event's, or an accelerator module's."""
    if run.state.events.get(receiver) is not None:
        return _event_synchronize(run, receiver, made)
    stream = run.as_stream(receiver, ask=False)
    if stream is not None:
        return _stream_synchronize(run, receiver, made)
    run.state.host_wait(None, run.now)
    return Value()


def elapsed(run: Run, receiver: Value, made: Call) -> Value:
    """Read the time between two events: the host reads a measured time."""
    run.note(HostRead(run.place(made.node)))
    for loop in run.loops[-1:]:
        loop.awaited = True
    return Value()


# accelerators whose streams are not CUDA's, by the modules that they are used through
_OTHERS = re.compile(r"(^|[._])(hpu|htcore|npu|mlu|musa|sdaa|gcu|tpu|xla)(\(\))?$", re.IGNORECASE)


def _of_another(receiver: Value) -> bool:
    """Return whether a device module is one of another accelerator than CUDA's."""
    path = receiver.path if isinstance(receiver, Dotted) else receiver.text
    return _OTHERS.search(path) is not None


def stream_context(run: Run, receiver: Value, made: Call) -> Value | None:
    """`accelerator.stream(side)`: a stream context of whatever device module."""
    if len(made.args) != 1 or made.keywords:
        return None
    if _of_another(receiver):
        return StreamContext(inner=None)
    run.uses_cuda(made.node)
    return StreamContext(inner=run.as_stream(made.args[0]))


def new_stream(run: Run, receiver: Value, made: Call) -> Value | None:
    """Make a stream of whatever device module."""
    if _of_another(receiver):
        return Value()
    run.uses_cuda(made.node)
    return Stream(made=run.place(made.node))


def current_stream(run: Run, receiver: Value, made: Call) -> Value:
    """Return the current stream of whatever device module."""
    if _of_another(receiver):
        return Value()
    run.uses_cuda(made.node)
    return run.state.current or Value("current_stream()")


def enter_context(run: Run, receiver: Value, made: Call) -> Value | None:
    """Enter a stream context by a context stack."""
    given = made.args[0] if made.args else None
    if isinstance(given, StreamContext):
        run.state.current = given.inner
        run.uses_streams()
        return Value()
    return None


_STREAM_METHODS: dict[str, Callable[[Run, Value, Call], Value]] = {
    "wait_stream": wait_stream,
    "wait_event": wait_event,
    "record_event": record_event,
    "synchronize": _stream_synchronize,
}


_EVENT_METHODS: dict[str, Callable[[Run, Value, Call], Value]] = {
    "record": record,
    "wait": event_wait,
    "synchronize": _event_synchronize,
    "elapsed_time": elapsed,
}
