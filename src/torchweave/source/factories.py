"""IDEA: what makes tensors: where they are, and whether they are pinned."""

from __future__ import annotations

from torchweave.source.run import Call, Run
from torchweave.source.values import (
    Const,
    Items,
    Tensor,
    Value,
    device_of,
    tensors_in,
)
from torchweave.source.words import (
    ALLOCATIONS,
    WRAPS_HOST,
)


def where(run: Run, made: Call) -> str:
    """Return the device that a factory's arguments name."""
    given = made.keywords.get("device")
    if given is None or (isinstance(given, Const) and given.value is None):
        return "" if made.starred else run.default_device
    return device_of(given)


_SMALL_BYTES = 64 * 1024


def factory(run: Run, name: str, made: Call) -> Value:
    """Make a tensor from nothing or from host memory."""
    device = where(run, made)
    pin = made.keywords.get("pin_memory")
    if isinstance(pin, Const) and pin.value is True:
        return run.pinned(made.node)
    if name in WRAPS_HOST and name != "asarray" and "device" not in made.keywords:
        source = made.given(0, "data")
        given = next(tensors_in(source), None)
        if given is not None or name == "as_tensor":
            return Tensor(device=given.device if given else "", pinned=given.pinned if given else None)
        return Tensor(device="cpu", pinned=False, origin=source.text if source is not None else "")
    if name in WRAPS_HOST and device != "cpu":
        if device == "cuda":
            run.uses_cuda(made.node)
        # memory that is on the device already is wrapped as it is
        return Tensor(device=device)
    if device == "cpu":
        # a short copy is staged at once: only memory whose size may be large counts as not pinned
        visible = pin is None and not made.starred and not _is_small(name, made)
        return Tensor(device="cpu", pinned=False if visible else None)
    if name == "tensor" and not _is_empty(made):
        return run.uploaded(made.node) if device == "cuda" else Tensor(device=device)
    return new(run, made, device, launches=name not in ALLOCATIONS and not _is_empty(made))


def _is_empty(made: Call) -> bool:
    first = made.args[0] if made.args else None
    return isinstance(first, Items) and not first.items


def _is_small(name: str, made: Call) -> bool:
    """Return whether a new tensor is visibly small, or may well be: a list of numbers, literal sizes."""
    if name == "tensor":
        return True
    sizes: list[object] = []
    for value in made.args[:2] if name == "full" else made.args:
        sizes += [getattr(one, "value", None) for one in (value.items if isinstance(value, Items) else [value])]
    numbers = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    if not sizes or len(numbers) < len(sizes):
        return False
    total = 4
    for number in numbers:
        total *= max(number, 1)
    return total <= _SMALL_BYTES


def new(run: Run, made: Call, device: str, *, launches: bool) -> Value:
    """Make a tensor on a device."""
    if device == "cpu":
        return Tensor(device="cpu")
    if device == "cuda":
        run.uses_cuda(made.node)
    if not launches:
        current = run.state.current
        return Tensor(device=device or ("cuda" if current is not None and not current.ambient else ""))
    return run.made(made.node, run.launch(made.node, [], device), device)
