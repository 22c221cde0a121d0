"""IDEA: what method calls do, by what they are called on; and calls of what is not in sight."""

from __future__ import annotations

import re
from collections.abc import Callable

from torchweave.source import autograd, builtin, collectives, streams, tensors
from torchweave.source.run import WAITING, Call, Run
from torchweave.source.values import (
    Clock,
    Dotted,
    Event,
    Instance,
    Loader,
    Module,
    Stream,
    Tensor,
    Value,
    Work,
    device_of,
    options,
    tensors_in,
)
from torchweave.source.words import (
    HARMLESS,
    HOST_METHODS,
    METADATA,
    MODULE,
    OPERATIONS,
    VIEWS,
)


def call(run: Run, function: Value, made: Call) -> Value:
    """Do what a call of a method, or of a value that is not known, does."""
    receiver = made.receiver
    if receiver is None:
        return _of_name(run, made)
    for one in options(receiver)[:4]:
        special = _OF_TYPE.get(type(one))
        if special is not None and len(options(receiver)) == 1:
            return special(run, one, made)
    if any(isinstance(one, Tensor) for one in options(receiver)):
        return tensors.of_tensor(run, receiver, made)
    handler = _OF_ANYTHING.get(made.name)
    if handler is not None:
        result = handler(run, receiver, made)
        if result is not None:
            return result
    if made.name in OPERATIONS:
        return run.compute(made.node, made.values)
    return opaque(run, made)


def _of_name(run: Run, made: Call) -> Value:
    """Do what a call of a bare name does that this file does not define."""
    result = builtin.builtin(run, made.name, made)
    return result if result is not None else opaque(run, made)


# what somebody else's clock is around: `do_bench`, `timeit`, `benchmark_forward`, `profile_shape`
_MEASURES = re.compile(r"(^|_)(bench\w*|timeit|profile|measure|autotune)(_|$)", re.IGNORECASE)


def opaque(run: Run, made: Call, *, imported: bool = False) -> Value:
    """Reckon with a call into code that is not in sight."""
    name = made.name.rpartition(".")[2]
    if name in ("append", "extend", "put", "add", "insert", "setdefault", "appendleft", "put_nowait"):
        for value in made.args:
            run.keep(value)
    tensors = [one for value in made.args + list(made.keywords.values()) for one in tensors_in(value)]
    if name in ("train", "eval") and made.receiver is not None and not made.args:
        return Value()  # a module's mode
    if _MEASURES.search(name):
        for loop in run.loops:
            loop.measured = True
    if (name in HARMLESS and not tensors) or name in VIEWS or name in METADATA:
        return Value()
    if name in ("backward", "run_backward"):
        return autograd.of_backward(run, made)
    if not imported and MODULE.match(name) and (made.args or made.keywords):
        sure = any(one.device == "cuda" for one in tensors)
        reads = [] if _hands_over_order(made) else [*made.args, *made.keywords.values()]
        result = run.compute(made.node, reads, "cuda" if sure else "", sure=sure)
        for tensor in tensors:
            tensor.storage.kept = True
        return result
    side = run.state.current is not None and not run.state.current.ambient
    if name not in HARMLESS:
        if side and tensors and not _hands_over_order(made) and not any(word in name.lower() for word in WAITING):
            for tensor in tensors:
                run.read(tensor, made.node, sure=False)
        for tensor in tensors:
            tensor.storage.kept = True
        run.maybe_waits(name)
    text = made.receiver.text + "." + name if made.receiver is not None else name
    if "stream" in name.lower():
        # asking twice for a stream gives the same one; asking for one of several may
        base = made.receiver or run.frame.get(name) or Value()
        if not made.args:
            return run.attribute(base, name + "()", text + "()")
        return run.one_of_streams(base, text)
    return Value()


def _hands_over_order(made: Call) -> bool:
    """Return whether a call is given a stream or event: then it can wait by itself."""
    given = [*((name, value) for name, value in made.keywords.items()), *(("", value) for value in made.args)]
    return any(
        isinstance(value, (Stream, Event)) or re.search("stream|event|ready|done", name + " " + value.text)
        for name, value in given
    )


def _optimizer_step(run: Run, receiver: Value, made: Call) -> Value | None:
    if re.search(r"(^|[._])(opt|optim|optimizer|scaler|sched|scheduler|lr_scheduler)\w*$", receiver.text or ""):
        run.launch(made.node, [])
        return Value()
    return None


def _scale(run: Run, receiver: Value, made: Call) -> Value | None:
    """`scaler.scale(loss)` of mixed precision is the loss, as far as streams matter."""
    return made.args[0] if made.args and "scaler" in receiver.text.lower() else None


def _of_module(run: Run, module: Value, made: Call) -> Value:
    if made.name in ("cuda", "to") and isinstance(module, (Module, Instance)):
        given = made.keywords.get("device") or (made.args[0] if made.args else None)
        device = "cuda" if made.name == "cuda" else device_of(given)
        if device == "cuda":
            run.uses_cuda(made.node)
        module.device = device or module.device
        return module
    if made.name in ("forward", "__call__"):
        return run.compute(made.node, made.args)
    if made.name in ("train", "eval", "half", "bfloat16", "float", "requires_grad_", "apply", "compile"):
        return module
    return opaque(run, made)


def _of_event_or_clock(run: Run, value: Value, made: Call) -> Value:
    return Value()


def _of_dotted(run: Run, value: Value, made: Call) -> Value:
    return run.call_path(value.path + "." + made.name, made) if isinstance(value, Dotted) else Value()


_OF_ANYTHING: dict[str, Callable[[Run, Value, Call], Value | None]] = {
    "wait_stream": streams.wait_stream,
    "wait_event": streams.wait_event,
    "record_event": streams.record_event,
    "record": streams.record,
    "record_stream": tensors.record_stream,
    "synchronize": streams.synchronize,
    "wait": collectives.wait_for_all,
    "elapsed_time": streams.elapsed,
    "to": tensors.to,
    "cuda": tensors.to,
    "copy_": tensors.copy_into,
    "pin_memory": tensors.pin,
    "step": _optimizer_step,
    "scale": _scale,
    "stream": streams.stream_context,
    "Stream": streams.new_stream,
    "current_stream": streams.current_stream,
    "default_stream": streams.current_stream,
    "enter_context": streams.enter_context,
    **dict.fromkeys(sorted(HOST_METHODS), tensors.unknown_to_host),
}


_OF_TYPE: dict[type[Value], Callable[[Run, Value, Call], Value]] = {
    Stream: streams.of_stream,
    Event: streams.of_event,
    Work: collectives.of_work,
    Clock: _of_event_or_clock,
    Module: _of_module,
    Instance: _of_module,
    Loader: _of_event_or_clock,
    Dotted: _of_dotted,
}
