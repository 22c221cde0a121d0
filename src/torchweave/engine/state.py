"""IDEA: what belongs to a strand and what to the process.

Two kinds of state would make a woven run differ from a serial one. What is *per thread* (grad mode, autocast, modes,
hooks, streams) has to be the same on the backward's worker thread as where `weave` was called: `Inherited`. What is
*per process* (the random state, numerical settings) would leak from one strand into the other: `Shared` is saved and
put back whenever the turn changes.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch as dispatch_modes

Setting: TypeAlias = tuple[str, Callable[[], Any], Callable[[Any], None]]


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(value[0], check_nan=value[1])


class _Same:
    """Compares by identity: `warnings.catch_warnings` puts an equal list in the place of the old one."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _set_warning_filters(kept: _Same) -> None:
    warnings.filters = kept.value
    getattr(warnings, "_filters_mutated_lock_held", getattr(warnings, "_filters_mutated", int))()


def _get_deterministic() -> tuple[bool, bool]:
    # what `torch.are_deterministic_algorithms_enabled` and its like call; these are asked at every crossing
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


# (backend, operation) of every float32 precision that torch tells apart; what is not set there is that of a parent
_PRECISIONS = tuple((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn"))
Precision: TypeAlias = tuple[str | None, tuple[str, ...]]


def _get_float32_precision(before: Precision | None = None) -> Precision:
    """Return the one precision of all matrix products, or None and that of each backend's operations.

    torch refuses to name the one where a program has set those of operations, as by
    `torch.backends.cuda.matmul.fp32_precision = "tf32"`. A refusal costs 8 us: where it was None before, and nothing
    has changed since, it is not asked for again.
    """
    each: tuple[str, ...] = ()
    if before is not None and before[0] is None:
        each = _precision_of_each()
        if each == before[1]:
            return before
    try:
        return torch._C._get_float32_matmul_precision(), ()
    except RuntimeError:
        return None, each or _precision_of_each()


def _precision_of_each() -> tuple[str, ...]:
    return tuple([torch._C._get_fp32_precision_getter(*one) for one in _PRECISIONS])


def _set_float32_precision(value: Precision) -> None:
    for_all, each = value
    if for_all is not None:
        torch._C._set_float32_matmul_precision(for_all)
    for one, precision in zip(_PRECISIONS, each, strict=False):
        if torch._C._get_fp32_precision_getter(*one) != precision:
            torch._C._set_fp32_precision_setter(*one, precision)


# Settings of the process that change numbers or checks. Each getter costs about a microsecond, or much less.
SETTINGS: tuple[Setting, ...] = (
    ("float32 precision", _get_float32_precision, _set_float32_precision),
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("deterministic algorithms", _get_deterministic, _set_deterministic),
    ("anomaly mode", lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomaly),
    ("flash attention", torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    ("memory-efficient attention", torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    ("math attention", torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    ("cuDNN attention", torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    ("oneDNN", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (
        "filling of uninitialized memory",
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory,
    ),
    ("warning filters", lambda: _Same(warnings.filters), _set_warning_filters),
    ("cuDNN", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    ("cuDNN benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    ("cuDNN deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)

_CHEAP_GETTERS = tuple(get for _, get, _ in SETTINGS[1:])


def _settings(before: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
    precision = _get_float32_precision(None if before is None else before[0])
    return (precision, *[get() for get in _CHEAP_GETTERS])


class Shared(NamedTuple):
    """State of the process at one moment: settings, and the random state of the CPU and of every device.

    Attributes:
        settings: Values in the order of `SETTINGS`.
        cpu: State of the CPU generator, uint8.
        devices: Seed and offset of each CUDA device's generator.
    """

    settings: tuple[Any, ...]
    cpu: torch.Tensor
    devices: tuple[tuple[int, int], ...]

    @classmethod
    def capture(cls, before: Shared | None = None) -> Shared:
        """Return the state as it is now.

        Args:
            before: An earlier state of the same program, which saves asking for what cannot have changed.
        """
        devices: tuple[tuple[int, int], ...] = ()
        if torch.cuda.is_initialized():
            devices = tuple((g.initial_seed(), g.get_offset()) for g in torch.cuda.default_generators)
        settings = _settings(None if before is None else before.settings)
        return cls(settings, torch.default_generator.get_state(), devices)

    def restore(self, now: Shared | None = None) -> None:
        """Make this the state of the process again; what is already so is left alone.

        Args:
            now: The state that the process is known to be in; without it everything is looked at.
        """
        settings = _settings() if now is None else now.settings
        if settings != self.settings:
            for (_, _, put), value, other in zip(SETTINGS, self.settings, settings, strict=True):
                if value != other:
                    put(value)
        torch.default_generator.set_state(self.cpu)
        if self.devices and (now is None or now.devices != self.devices):
            for generator, (seed, offset) in zip(torch.cuda.default_generators, self.devices, strict=True):
                if generator.initial_seed() != seed:
                    generator.manual_seed(seed)
                if generator.get_offset() != offset:
                    generator.set_offset(offset)

    def changes(self, later: Shared) -> tuple[str, ...]:
        """Name what differs in a later state."""
        found = [
            name
            for (name, _, _), before, after in zip(SETTINGS, self.settings, later.settings, strict=True)
            if before != after
        ]
        if not torch.equal(self.cpu, later.cpu):
            found.append("random state of the CPU")
        # devices that were not initialised before have their first state now: nothing was drawn from them earlier
        for index, (before, after) in enumerate(zip(self.devices, later.devices, strict=False)):
            if before != after:
                found.append(f"random state of CUDA device {index}")
        return tuple(found)


_NOTHING = object()


class Inherited:
    """State of the calling thread, for the thread that runs the backward strand.

    Source: torch keeps each of these in thread-local storage; a new thread begins with the defaults.
    """

    def __init__(self) -> None:
        # what the work left changed on its thread
        self.left_behind: tuple[str, ...] = ()
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._functions = _get_current_function_mode_stack()
        self._dispatches = dispatch_modes._get_current_dispatch_mode_stack()
        self._saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._hooks_forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        self._threads = torch.get_num_threads()
        self._autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_kinds()
        )
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        self._device: int | None = None
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if torch.cuda.is_initialized():
            self._device = torch.cuda.current_device()
            # setting a stream of a device that this process does not use would make a context there: each rank
            # would take memory of every other rank's device
            cuda: Any = torch._C  # builds without CUDA do not have its functions
            used = (d for d in range(torch.cuda.device_count()) if cuda._cuda_hasPrimaryContext(d))
            self._streams = tuple(torch.cuda.current_stream(d) for d in used)

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` on this thread under the state that was captured."""
        self._context.run(self._run, work)

    def clear_casts(self) -> None:
        """Throw the autocast cache away where the caller is in no autocast region, as a region's own end does."""
        if self._nesting == 0:
            torch.clear_autocast_cache()

    def _run(self, work: Callable[[], None]) -> None:
        variables = dict(contextvars.copy_context())
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(self._thread_settings())
            stack.enter_context(self._autocast_state())
            stack.enter_context(self._saved_hooks())
            stack.enter_context(self._modes())
            work()
            self.left_behind = self._left_behind(variables)

    def _left_behind(self, variables: dict[contextvars.ContextVar[Any], Any]) -> tuple[str, ...]:
        """Name what the work left changed on its thread: after a serial run, the caller would have it."""
        found = []
        if torch.is_grad_enabled() != self._grad:
            found.append("grad mode")
        if torch.get_num_threads() != self._threads:
            found.append("number of threads")
        if any(torch.is_autocast_enabled(kind) != enabled for kind, enabled, _ in self._autocast):
            found.append("autocast")
        now = contextvars.copy_context()
        found.extend(f"context variable {var.name!r}" for var in now if now[var] is not variables.get(var, _NOTHING))
        return tuple(found)

    @contextlib.contextmanager
    def _thread_settings(self) -> Iterator[None]:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if self._device is not None:
            for stream in self._streams:
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(self._device)
        yield

    @contextlib.contextmanager
    def _autocast_state(self) -> Iterator[None]:
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        # The cache of casts is the process's, the nesting is the thread's: a region that ends here at nesting 0 would
        # throw away the casts that the forward strand is using. One level more than the caller keeps them.
        for _ in range(self._nesting + 1):
            torch.autocast_increment_nesting()
        try:
            yield
        finally:
            for _ in range(self._nesting + 1):
                torch.autocast_decrement_nesting()

    @contextlib.contextmanager
    def _saved_hooks(self) -> Iterator[None]:
        autograd = torch._C._autograd
        if self._hooks_forbidden is not None:
            autograd._saved_tensors_hooks_disable(self._hooks_forbidden)
        if self._saved_tensor_hooks is not None:
            autograd._push_saved_tensors_default_hooks(*self._saved_tensor_hooks)
        try:
            yield
        finally:
            if self._saved_tensor_hooks is not None:
                autograd._pop_saved_tensors_default_hooks()

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        for mode in self._functions:
            torch._C._push_on_torch_function_stack(mode)
        for mode in self._dispatches:
            dispatch_modes._push_mode(mode)
        try:
            yield
        finally:
            for mode in reversed(self._dispatches):
                dispatch_modes._pop_mode(getattr(mode, "_mode_key", None))
            for _ in self._functions:
                torch._C._pop_torch_function_stack()


def _autocast_kinds() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
