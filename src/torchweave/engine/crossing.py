"""IDEA: communication that is not `torch.distributed`'s can say where it begins and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweave.engine.pair import engine
from torchweave.errors import UsageError, described


def communication(*tensors: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Run the communication inside on a communication lane, and let the other strand go on until it has ended.

    For communication that weave cannot find by itself: DeepEP, a custom kernel, a copy to the host. With CUDA, what is
    launched inside goes to a side stream, and the strand's own stream waits for it only when the strand goes on.
    Without, the body itself runs beside the other strand. Outside a weave it does nothing.

    Args:
        tensors: What the body uses by other means than torch operators (those are seen): kept alive until the strand's
            stream waits for the lane, so that their memory is not used again too early.

    Returns:
        A context manager, for one `with` block.

    Raises:
        UsageError: An argument is no tensor.
        NotWeavableError: `torch.distributed` is used inside; it is found by itself and needs no region.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                "communication() takes the tensors that its body uses, one by one",
                given=described(tensor),
                remedy="write `with communication(x, y):`, or `with communication():` where torch operators use them",
            )
    return _region(tensors)


@contextlib.contextmanager
def _region(tensors: tuple[torch.Tensor, ...]) -> Iterator[None]:
    strand = engine().interception.current()
    if strand is None or strand.inside:
        yield
    elif not torch.cuda.is_initialized():
        with strand.region(holds_turn=False):
            yield
    else:
        own = torch.cuda.current_stream()
        lane = engine().lanes.communication(own.device, strand.name)
        keeper = _Keeper(tensors)
        lane.wait_stream(own)
        try:
            with strand.region(holds_turn=True), torch.cuda.stream(lane), keeper:
                yield
        finally:
            # also when an exception unwinds: what the keeper holds must not be freed before this wait is queued
            own.wait_stream(lane)
            keeper.release()


class _Keeper(TorchDispatchMode):
    """Keeps alive every tensor that an operator of torch reads or makes."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Any] = list(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._kept.extend(leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        return result

    def release(self) -> None:
        """Let go of them."""
        self._kept.clear()
