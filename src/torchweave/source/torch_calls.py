"""IDEA: what calls by an imported path do: `torch.randn`, `time.time`, `torch.autograd.grad`."""

from __future__ import annotations

from collections.abc import Callable

from torchweave.source import autograd, clocks, collectives, devices, environment, factories, streams
from torchweave.source.run import Call, Run
from torchweave.source.values import (
    Const,
    Function,
    Loader,
    Module,
    Tensor,
    Value,
    device_of,
    options,
    tensors_in,
)
from torchweave.source.words import (
    ALLOCATIONS,
    CLOCKS,
    FACTORIES,
    HARMLESS,
    HARMLESS_ROOTS,
    LIKE,
    NAMESPACES_OF_OPERATIONS,
    NO_OPERATIONS,
    SYNCHRONIZING_FUNCTIONS,
    WRAPS_HOST,
)


def call(run: Run, path: str, made: Call) -> Value:
    """Do what a call by path does, and return its value."""
    path = path.removeprefix("torch._C._cuda_") if path.startswith("torch._C._cuda_") else path
    if path in CLOCKS:
        return clocks.read(run, made.node)
    handler = _HANDLERS.get(path)
    if handler is not None:
        return handler(run, made)
    head, _, name = path.rpartition(".")
    if head in ("torch.cuda", "torch.accelerator", "torch.xpu"):
        handler = devices.HANDLERS.get(name)
        if handler is not None:
            return handler(run, made)
        if head == "torch.cuda":
            return devices.other(run, name, made)
        return Value()
    if head == "torch":
        return _torch(run, name, made)
    if head == "torch.distributed":
        return collectives.distributed(run, name, made)
    if path.startswith(NAMESPACES_OF_OPERATIONS):
        return run.compute(made.node, made.values)
    if path.startswith("deepspeed.comm."):
        return collectives.distributed(run, name, made)
    if path.startswith("torch.nn."):
        return Module(name) if name[:1].isupper() else Value()
    if path.startswith(("torch.cuda.", "torch.optim", "torch.profiler", "torch.autograd.profiler")):
        return Value()
    if path == "torch.Tensor" or path.startswith("torch.Tensor."):
        return unbound(run, name, made)
    root = path.partition(".")[0]
    if root in HARMLESS_ROOTS or (name in HARMLESS and not any(True for one in made.args for _ in tensors_in(one))):
        return Value()
    return run.opaque(made, imported=not name[:1].isupper())


def _torch(run: Run, name: str, made: Call) -> Value:
    streams.refuse_stream_keyword(run, f"torch.{name}", made)
    if name in FACTORIES or name in ALLOCATIONS or name in WRAPS_HOST:
        return factories.factory(run, name, made)
    if name in (*LIKE, "empty_like") and isinstance(made.keywords.get("pin_memory"), Const):
        return factories.factory(run, name, made)
    if name in LIKE:
        device = device_of(made.keywords["device"]) if "device" in made.keywords else device_of(made.given(0, "input"))
        return factories.new(run, made, device, launches=True)
    if name in NO_OPERATIONS or not name or name[0].isupper() or name.startswith("_"):
        return Module(name) if name == "compile" else Value()
    tensors = [one for value in made.values for one in tensors_in(value)]
    if name in SYNCHRONIZING_FUNCTIONS or (name == "where" and len(made.args) == 1 and not made.keywords):
        return _waiting_function(run, name, made)
    if name == "repeat_interleave" and "output_size" not in made.keywords and len(tensors) > 1:
        return _waiting_function(run, name, made)
    if not made.args and not tensors:
        return Value()
    return run.compute(made.node, made.values)


def _waiting_function(run: Run, name: str, made: Call) -> Value:
    for value in made.args:
        if any(True for _ in tensors_in(value)):
            run.compute(made.node, [value])
            run.download(made.node, value, f"torch.{name}()")
            break
    return Tensor(device=device_of(made.args[0]) if made.args else "")


def _backward(run: Run, made: Call) -> Value:
    return autograd.backward(run, made, made.given(0, "tensors"), made.given(1, "grad_tensors"))


def _grad(run: Run, made: Call) -> Value:
    autograd.backward(run, made, made.given(0, "outputs"), made.given(2, "grad_outputs"))
    return Value()


def _timeit(run: Run, made: Call) -> Value:
    work = made.given(0, "stmt")
    for one in options(work):
        if isinstance(one, Function):
            begin = clocks.read(run, made.node)
            run.inline(one, Call(made.node, "stmt", None, [], {}, starred=False))
            clocks.subtract(run, clocks.read(run, made.node), begin)
    return Value()


def _loader(run: Run, made: Call) -> Value:
    given = made.keywords.get("pin_memory")
    if isinstance(given, Const):
        return Loader(pinned=bool(given.value))
    # a sampler or a collate function of one's own could pin or place the batch itself
    unknown = given is not None or made.starred or "collate_fn" in made.keywords or len(made.args) > 6
    return Loader(pinned=None if unknown else False)


def _device(run: Run, made: Call) -> Value:
    found = device_of(made.given(0, "device"))
    return Const(value=found or None) if found else Value("device")


def _set_default_device(run: Run, made: Call) -> Value:
    run.default_device = device_of(made.given(0, "device"))
    return Value()


_HANDLERS: dict[str, Callable[[Run, Call], Value]] = {
    "torch.Stream": devices.stream,
    "torch.Event": devices.event,
    "torch.device": _device,
    "torch.set_default_device": _set_default_device,
    "torch.set_default_tensor_type": _set_default_device,
    "torch.autograd.backward": _backward,
    "torch.autograd.grad": _grad,
    "torch.utils.data.DataLoader": _loader,
    "timeit.timeit": _timeit,
    "timeit.repeat": _timeit,
    "timeit.Timer": _timeit,
    "os.putenv": environment.put,
    "os.environ.setdefault": environment.put,
    "os.environ.__setitem__": environment.put,
    "os.environ.update": environment.update,
    "torch.cuda.streams.Stream": devices.stream,
    "torch.cuda.streams.Event": devices.event,
}


def unbound(run: Run, name: str, made: Call) -> Value:
    """Do what `torch.Tensor.name(x, ...)` does."""
    if not made.args:
        return Tensor(device="cpu")
    return run.call_method(Value(), Call(made.node, name, made.args[0], made.args[1:], made.keywords, made.starred))
