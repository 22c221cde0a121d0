"""IDEA: what the methods of tensors do: launch, copy, wait, or nothing."""

from __future__ import annotations

from collections.abc import Callable

from torchweave.source import autograd, clocks, streams
from torchweave.source.facts import (
    PageableUpload,
)
from torchweave.source.run import Call, Run
from torchweave.source.values import (
    Const,
    Module,
    Tensor,
    Value,
    device_of,
    options,
    tensors_in,
)
from torchweave.source.words import (
    HOST_METHODS,
    METADATA,
    MODULE,
    VIEWS,
)


def of_tensor(run: Run, receiver: Value, made: Call) -> Value:
    """Do what a method of a tensor does."""
    name = made.name
    handler = _METHODS.get(name)
    if handler is not None:
        result = handler(run, receiver, made)
        if result is not None:
            return result
    if name == "set_":
        for one in options(receiver):
            if isinstance(one, Tensor):
                one.storage = type(one.storage)()  # other memory, of which nothing is known
        return receiver
    if name in METADATA:
        return receiver if name.endswith("_") else Value()
    if name in VIEWS:
        return receiver
    if name.startswith("new_"):
        # made like the tensor, which is not read
        device = device_of(made.keywords.get("device")) or device_of(receiver)
        return run.made(made.node, run.launch(made.node, [], device), device)
    if "stream" in made.keywords:
        streams.refuse_stream_keyword(run, f"Tensor.{name}", made)
    if not name.endswith("_") or name.endswith("__"):
        return run.compute(made.node, made.values)
    run.wrote(receiver, run.launch(made.node, made.values))
    return receiver


def _to_host(run: Run, receiver: Value, made: Call) -> Value:
    run.download(made.node, receiver, f".{made.name}()")
    if made.name in ("cpu", "numpy"):
        return Tensor(receiver.text, device="cpu", pinned=False)
    return Tensor(device=device_of(receiver)) if made.name in ("nonzero", "masked_select", "unique") else Value()


def unknown_to_host(run: Run, receiver: Value, made: Call) -> Value | None:
    """`.item()` and its like on a value that is not known to be a tensor."""
    if made.args or made.name in ("numpy", "equal"):
        return None
    if type(receiver) is Value and made.name in ("item", "cpu", "tolist", "nonzero"):
        side = run.state.current is not None and not run.state.current.ambient
        run.state.host_wait(run.state.current if side else None, run.now)
    return Tensor(device="cpu", pinned=None) if made.name in ("cpu", "numpy") else Value()


def _is_true(value: Value | None) -> bool:
    return isinstance(value, Const) and value.value is True


def to(run: Run, receiver: Value, made: Call) -> Value | None:
    """`.to(device)` and `.cuda()` of a tensor or module."""
    if made.name == "cuda":
        device = "cuda"
    else:
        given = made.keywords.get("device") or (made.args[0] if made.args else None)
        device = device_of(given) if not (isinstance(given, Const) and isinstance(given.value, int)) else "cuda"
    known = [one for one in options(receiver) if isinstance(one, Tensor)]
    non_blocking = made.keywords.get("non_blocking") or made.given(1, "non_blocking")
    if device == "cuda":
        run.uses_cuda(made.node)
    if not known and device == "cuda" and MODULE.match(receiver.text.rpartition(".")[2]):
        return Module(receiver.text, device=device)
    if not known:
        if type(receiver) is Value and device == "cuda" and not _is_true(non_blocking):
            return run.uploaded(made.node, receiver.text)
        if type(receiver) is Value and device == "cuda":
            return run.made(made.node, run.launch(made.node, [], "cuda", sure=False), "cuda", receiver.text)
        return None
    if device == "cpu":
        if not _is_true(non_blocking) and known[0].device != "cpu":
            run.download(made.node, receiver, '.to("cpu")')
        elif known[0].device != "cpu":
            run.launch(made.node, [receiver], what="copy")
        return Tensor(receiver.text, device="cpu", pinned=False if not _is_true(non_blocking) else None)
    if not device:
        named = made.args and type(made.args[0]) is Value and "dtype" not in made.args[0].text
        if named and _is_true(non_blocking):
            upload(run, made, receiver, sure=False)
        return run.compute(made.node, [receiver]) if known[0].device != "cpu" else Tensor(receiver.text)
    if known[0].device == "cuda" and run.state.current is getattr(
        run.state.last_write(known[0].storage), "stream", None
    ):
        return receiver  # it is there already
    if known[0].device == "cpu" and not _is_true(non_blocking):
        return run.uploaded(made.node, receiver.text)
    if _is_true(non_blocking):
        upload(run, made, receiver, sure=True)
    return run.made(made.node, run.launch(made.node, [receiver], "cuda"), "cuda")


def upload(run: Run, made: Call, source: Value, *, sure: bool) -> None:
    """Tell of an asynchronous copy from memory that is visibly not pinned."""
    tensors = list(tensors_in(source))
    wraps = [one for one in tensors if one.origin is not None]
    if wraps and not sure:
        return  # neither how much there is nor where it goes
    if tensors and all(one.device == "cpu" and one.pinned is False for one in tensors):
        text = source.text or tensors[0].text
        names = " ".join((*(one.origin or "" for one in wraps), clocks.label(run)))
        run.note(PageableUpload(run.place(made.node), text, names, sure=sure))


def copy_into(run: Run, receiver: Value, made: Call) -> Value | None:
    """`target.copy_(source, non_blocking=True)`."""
    source = made.given(0, "src")
    non_blocking = made.given(1, "non_blocking")
    targets = list(tensors_in(receiver))
    on_device = any(one.device == "cuda" for one in targets)
    if source is not None and _is_true(non_blocking) and on_device:
        upload(run, made, source, sure=True)
    device, what = ("cuda", "") if on_device else ("", "copy")
    launch = run.launch(made.node, [source] if source is not None else [], device, what=what)
    for one in targets if launch is not None else ():
        run.read(one, made.node)  # what is written must be there, and not be in use
    run.wrote(receiver, launch)
    if targets and targets[0].device == "cpu" and not _is_true(non_blocking) and device_of(source) == "cuda":
        run.download(made.node, source or Value(), ".copy_() to the host")
    return receiver


def pin(run: Run, receiver: Value, made: Call) -> Value | None:
    """Make a pinned copy."""
    return run.pinned(made.node)


def record_stream(run: Run, receiver: Value, made: Call) -> Value:
    """Tell the allocator that a stream uses a tensor."""
    run.uses_cuda(made.node)
    run.keep(receiver)
    return Value()


_METHODS: dict[str, Callable[[Run, Value, Call], Value | None]] = {
    "backward": autograd.tensor_backward,
    "to": to,
    "cuda": to,
    "copy_": copy_into,
    "pin_memory": pin,
    "record_stream": record_stream,
    **dict.fromkeys(sorted(HOST_METHODS), _to_host),
}
