"""IDEA: find the crossings by themselves, wherever a strand's thread uses `torch.distributed`.

Three doors lead from Python into c10d, and each is watched on the threads of strands alone:

- methods of `ProcessGroup`, which `dist.*` calls. A synchronous call is made asynchronous (`opts.asyncOp`), so that
  `dist.*` itself waits on the Work that comes back, and the backend uses the communicator's own stream;
- `Work.wait`, at which the other strand goes on;
- `_c10d_functional` operations and their `wait_tensor`, at the dispatch key BackendSelect: above it, autograd and
  tensor subclasses have done their part, and every caller is seen, from C++ too.

Two more are watched: autograd's own, for the backward strand's weight gradients that can wait (`later`), and reads of
device tensors by the host (`reads`).

A turn is taken at waits alone. At an asynchronous start the caller may hold a mutex (DDP's reducer does).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor

from torchweave.engine.channels import Channels
from torchweave.engine.reads import READS, blocks
from torchweave.engine.strands import Strand
from torchweave.errors import NotWeavableError

COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
# (whether the peer is the source) by method
POINT_TO_POINT = {"send": False, "recv": True}
ANY_SOURCE = "recv_anysource"
# what `torch.autograd.backward` calls, by this name
RUN_BACKWARD = "_engine_run_backward"
END_OF_BLOCK = "_end_coalescing"

# stands for a method that a class did not have itself
_INHERITED = object()
# c10d collects a block's operations per group, so that the other strand's would slip into it
_COALESCED = "operations are coalesced, which is per group and not per thread"
_FUNCTIONAL = "_c10d_functional"
_WAIT_TENSOR = "wait_tensor"


class Interception:
    """Watches c10d for the threads that are bound to a strand; all others pass at the cost of a dictionary look-up.

    Args:
        channels: The process's channels.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._strands: dict[int, Strand] = {}
        self._originals: list[tuple[Any, str, Any]] = []
        self._library: torch.library.Library | None = None
        # groups on which other threads issued operations while a pair was recorded; None while none is
        self.foreign: set[str] | None = None

    @property
    def installed(self) -> bool:
        """Whether c10d is being watched."""
        return self._library is not None

    def bind(self, strand: Strand) -> None:
        """Make this thread a strand's."""
        self._strands[get_ident()] = strand

    def unbind(self) -> None:
        """Make this thread nobody's again."""
        self._strands.pop(get_ident(), None)

    def current(self) -> Strand | None:
        """Return the strand that this thread runs, or None."""
        return self._strands.get(get_ident())

    def install(self) -> None:
        """Begin to watch c10d; once is enough for all pairs."""
        try:
            self._install()
        except BaseException:  # half of it would be put on top of itself the next time
            self.remove()
            raise

    def _install(self) -> None:
        for name in COLLECTIVES:
            self._replace(dist.ProcessGroup, name, self._collective)
        for name in POINT_TO_POINT:
            self._replace(dist.ProcessGroup, name, self._point_to_point)
        self._replace(dist.ProcessGroup, ANY_SOURCE, self._any_source)
        self._replace(dist.ProcessGroup, END_OF_BLOCK, self._end_of_block)
        self._replace(c10d.Work, "wait", self._work_wait)
        for name in READS:
            self._add(torch.Tensor, name, self._read)
        self._replace(torch.autograd, RUN_BACKWARD, self._run_backward)
        self._library = torch.library.Library(_FUNCTIONAL, "IMPL")
        for name, group_at in _functional_operations():
            operation = getattr(getattr(torch.ops, _FUNCTIONAL), name).default
            kernel = (
                self._functional_wait(operation)
                if name == _WAIT_TENSOR
                else self._functional_start(operation, name, group_at)
            )
            self._library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def remove(self) -> None:
        """Leave c10d as it was."""
        while self._originals:
            owner, name, entry = self._originals.pop()
            if entry is not _INHERITED:
                setattr(owner, name, entry)
            elif name in vars(owner):
                delattr(owner, name)
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _replace(self, owner: Any, name: str, make: Callable[[str, Any], Any]) -> None:
        if name in vars(owner):  # names differ between torch versions
            original = getattr(owner, name)
            # what is put back later is the class's own entry, which binds to its instances; `original` does not
            self._originals.append((owner, name, vars(owner)[name]))
            setattr(owner, name, functools.wraps(original)(make(name, original)))

    def _add(self, owner: Any, name: str, make: Callable[[str, Any], Any]) -> None:
        """Put a method in front of one that a class inherits."""
        if name in vars(owner):  # somebody else has done so before
            self._replace(owner, name, make)
            return
        original = getattr(owner, name)
        self._originals.append((owner, name, _INHERITED))
        setattr(owner, name, functools.wraps(original)(make(name, original)))

    def _collective(self, name: str, original: Any) -> Any:
        strands, channels, is_block = self._strands, self._channels, name.endswith("_coalesced")

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            strand = strands.get(get_ident())
            if strand is None or strand.inside:
                if strand is None and self.foreign is not None:
                    self.foreign.add(str(group.group_name))
                return original(group, *args, **kwargs)
            if is_block:
                strand.conduct.forbid_streams(_COALESCED)
            channel = channels.of_group(group)
            return _start(strand, name, channel, channels, original, (group, *args), kwargs)

        return call

    def _point_to_point(self, name: str, original: Any) -> Any:
        strands, channels, peer_is_source = self._strands, self._channels, POINT_TO_POINT[name]

        def call(group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            strand = strands.get(get_ident())
            if strand is None or strand.inside:
                return original(group, tensors, peer, *args, **kwargs)
            ends = (peer, group.rank()) if peer_is_source else (group.rank(), peer)
            channel = channels.of_ends(group, *ends)
            return _start(strand, name, channel, channels, original, (group, tensors, peer, *args), kwargs)

        return call

    def _any_source(self, name: str, original: Any) -> Any:
        strands = self._strands

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            strand = strands.get(get_ident())
            if strand is not None and not strand.inside:
                strand.conduct.forbid(strand, "it receives from any source, so that its order cannot be proved")
            return original(group, *args, **kwargs)

        return call

    def _end_of_block(self, name: str, original: Any) -> Any:
        strands, channels = self._strands, self._channels

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            strand = strands.get(get_ident())
            if strand is not None and not strand.inside:
                strand.conduct.forbid_streams(_COALESCED)
                strand.keep_work(work, quiet=not channels.takes_turns(channels.of_group(group)))
            return work

        return call

    def _work_wait(self, _name: str, original: Any) -> Any:
        strands = self._strands

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            strand = strands.get(get_ident())
            if strand is None or strand.inside:
                return original(work, *args, **kwargs)
            return strand.wait_work(work, functools.partial(original, work, *args, **kwargs))

        return wait

    def _read(self, _name: str, original: Any) -> Any:
        strands = self._strands

        def read(tensor: torch.Tensor) -> Any:
            strand = strands.get(get_ident())
            if strand is None or strand.inside or strand.in_region or not blocks(tensor):
                return original(tensor)
            return original(strand.read(tensor))

        return read

    def _run_backward(self, _name: str, original: Any) -> Any:
        strands = self._strands

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            strand = strands.get(get_ident())
            if strand is None or strand.later is None or not strand.has_waits_left():
                return original(*args, **kwargs)
            return strand.later.run_backward(original, args, kwargs)

        return run_backward

    def _functional_start(self, operation: Any, name: str, group_at: int) -> Callable[..., Any]:
        strands, channels, below = self._strands, self._channels, _below_backend_select()

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            strand = strands.get(get_ident())
            if strand is None or strand.inside or _is_traced(args):
                return operation.redispatch(keys & below, *args, **kwargs)
            channel = channels.of_group(_group_of(args[group_at]))
            start = functools.partial(operation.redispatch, keys & below, *args, **kwargs)
            if not channels.takes_turns(channel):
                return strand.pass_through(start)
            result = strand.issue(name, channel, start)
            strand.keep_tensors([result] if isinstance(result, torch.Tensor) else list(result))
            return result

        return kernel

    def _functional_wait(self, operation: Any) -> Callable[..., Any]:
        strands, below = self._strands, _below_backend_select()

        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            strand = strands.get(get_ident())
            if strand is None or strand.inside or _is_traced((tensor,)):
                return operation.redispatch(keys & below, tensor)
            return strand.wait_tensor(tensor, functools.partial(operation.redispatch, keys & below, tensor))

        return kernel


def _start(
    strand: Strand,
    name: str,
    channel: Any,
    channels: Channels,
    original: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Issue an operation of `ProcessGroup` for a strand, asynchronously, and keep its Work."""
    if strand.later is not None:
        strand.later.spare(args)
    if not channels.takes_turns(channel):
        work = strand.pass_through(functools.partial(original, *args, **kwargs))
        strand.keep_work(work, quiet=True)
        return work
    options = kwargs.get("opts", args[-1])
    if getattr(options, "asyncOp", None) is False:
        options.asyncOp = True
    work = strand.issue(name, channel, functools.partial(original, *args, **kwargs))
    strand.keep_work(work)
    return work


def _functional_operations() -> list[tuple[str, int]]:
    """Return the functional operations of this torch: name, and which argument is the group (-1 for wait_tensor)."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == _FUNCTIONAL and not schema.overload_name:
            names = [argument.name for argument in schema.arguments]
            if name == _WAIT_TENSOR:
                found.append((name, -1))
            elif "group_name" in names:
                found.append((name, names.index("group_name")))
    if not any(name == _WAIT_TENSOR for name, _ in found):
        raise NotWeavableError(
            "weave needs torch's functional collectives",
            given=f"torch {torch.__version__} has no {_FUNCTIONAL}::{_WAIT_TENSOR}",
            remedy="use torch 2.10 or newer",
        )
    return found


def _below_backend_select() -> Any:
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _group_of(group: Any) -> dist.ProcessGroup:
    """Return the process group that a functional operation was given, by name or itself."""
    if isinstance(group, str):
        group = c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return cast(dist.ProcessGroup, group)


def _is_traced(args: tuple[Any, ...]) -> bool:
    """Whether a compiler is looking, and nothing is sent."""
    first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
    return isinstance(first, torch.Tensor) and (first.is_meta or isinstance(first, FakeTensor))
