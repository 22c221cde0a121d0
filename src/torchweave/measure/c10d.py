"""IDEA: see every operation of torch.distributed below its Python, at the dispatcher, whoever calls it.

One generic Python kernel stands at the dispatch key BackendSelect of every `c10d` operation that returns a Work. The
`dist.*` functions, the functional collectives and C++ callers all pass there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torchweave.engine.later import tensors_of
from torchweave.errors import TorchweaveError

# Taken here, before anything can put another function in their places: what waits below a crossing is none itself.
raw_wait: Callable[..., bool] = inspect.unwrap(c10d.Work.wait)
raw_wait_callback: Callable[..., bool] = inspect.unwrap(c10d.PythonCallbackWork.wait)

# not annotated in torch
_new_library: Callable[..., Any] = torch.library.Library

POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the namespace `c10d`.

    Args:
        name: Its name in the schema, without the namespace.
        overload: What calls it through the dispatcher.
        group_at: Which positional argument is the process group.
        returns_outputs: Whether it returns its first argument beside the Work.
    """

    name: str
    overload: Any
    group_at: int
    returns_outputs: bool

    def group_of(self, args: tuple[Any, ...]) -> torch.distributed.ProcessGroup:
        """Return the process group among the arguments of a call."""
        group: torch.distributed.ProcessGroup = torch.distributed.ProcessGroup.unbox(args[self.group_at])
        return group

    def result(self, args: tuple[Any, ...], work: c10d.Work) -> Any:
        """Return what the operation returns with this Work in it."""
        return (args[0], work.boxed()) if self.returns_outputs else work.boxed()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation, not yet handed to the backend.

    Args:
        operation: What was called.
        args: Positional arguments; trailing ones that equal their defaults are left out by the dispatcher.
        kwargs: Keyword arguments.
        keyset: Where the dispatcher goes on.
    """

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyset: Any

    def redispatch(self) -> Any:
        """Hand the call to its backend and return the operation's own result."""
        return self.operation.overload.redispatch(self.keyset, *self.args, **self.kwargs)

    def replaced(self, result: Any, work: c10d.Work) -> Any:
        """Return the operation's result with another Work in it."""
        return (*result[:-1], work.boxed()) if self.operation.returns_outputs else work.boxed()


Handler = Callable[[Call], Any]


def unboxed_work(result: Any) -> c10d.Work | None:
    """Return the Work of an operation's result; None where the backend gave none (synchronous NCCL)."""
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    return None if boxed is None else c10d.Work.unbox(boxed)


def num_bytes(args: tuple[Any, ...]) -> int:
    """Return what a collective moves on this rank: the larger of what it reads and what it writes.

    That is the input of an all-to-all or a reduce-scatter, the output of an all-gather, and the tensor of a
    broadcast, an all-reduce or a point-to-point operation.

    Args:
        args: Positional arguments of a `c10d` operation; buffers come first.

    Returns:
        Bytes; 0 for a barrier.
    """
    first = _bytes_of(args[0])
    return max(first, _bytes_of(args[1])) if len(args) > 1 else first


def _bytes_of(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(argument))


class Interception:
    """Sends every call of torch.distributed that returns a Work to a handler until it is closed.

    Args:
        handler: Gets the call and returns what the operation returns.

    Raises:
        TorchweaveError: This torch lacks the hooks, or another interception is open in the process.
    """

    def __init__(self, handler: Handler) -> None:
        _check_torch()
        if torch._C._dispatch_has_kernel_for_dispatch_key("c10d::barrier", "BackendSelect"):
            raise TorchweaveError(
                "One simulated link at a time sees a process's communication",
                given="a second one",
                remedy="leave the first one's `with` block before entering another",
            )
        # The Works of a link have to look like any other: whatever watches `Work.wait` has to see them, and the
        # own `wait` of their class would hide them. Without it Python finds `Work.wait`: the same virtual method.
        if vars(c10d.PythonCallbackWork).get("wait") is raw_wait_callback:
            del c10d.PythonCallbackWork.wait
        self._library = _new_library("c10d", "IMPL")
        for operation in work_operations():
            self._library.impl(operation.name, _kernel(operation, handler), "BackendSelect", with_keyset=True)

    def close(self) -> None:
        """Take the kernels away; collectives go to their backends untouched again."""
        self._library._destroy()
        if "wait" not in vars(c10d.PythonCallbackWork):
            c10d.PythonCallbackWork.wait = raw_wait_callback  # type: ignore[method-assign]


def work_operations() -> list[Operation]:
    """Return every operation of the namespace `c10d` that returns a Work."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "c10d" or not schema.returns or not str(schema.returns[-1].type).endswith("c10d.Work"):
            continue
        names = [argument.name for argument in schema.arguments]
        packet = getattr(torch.ops.c10d, name)
        overload = getattr(packet, schema.overload_name or "default")
        found.append(Operation(name, overload, names.index("process_group"), len(schema.returns) > 1))
    return found


def _kernel(operation: Operation, handler: Handler) -> Callable[..., Any]:
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(Call(operation, args, kwargs, keyset & after))

    return kernel


def _check_torch() -> None:
    if not torch.distributed.is_available():
        raise TorchweaveError("A link needs torch.distributed", given=f"torch {torch.__version__} built without it")
    missing = [name for name in ("PythonCallbackWork", "Work") if not hasattr(c10d, name)]
    missing += [f"Work.{name}" for name in ("boxed", "unbox") if not hasattr(c10d.Work, name)]
    if missing:
        raise TorchweaveError(
            "A link needs a torch in which Python can stand in for a collective's Work",
            given=f"torch {torch.__version__} without {', '.join(missing)}",
            remedy="install torch 2.10 or newer",
        )
