"""IDEA: the kernel that plays a link on a GPU, compiled by NVRTC and launched through the driver.

Every collective launches it once, so the launch is prepared: arguments live in ctypes objects that are only set.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import threading
from pathlib import Path
from typing import Any

import torch

from torchweave.errors import TorchweaveError

NAME = "torchweave_link"
NUM_THREADS = 1024
VECTOR_BYTES = 16
# The duration travels as a C int of nanoseconds.
LONGEST_NS = 2_000_000_000

# The kernels take each of their SMs whole (maximal shared memory) and move bytes no faster than the link would: `hold`
# moves what so few SMs can move by the deadline, for nobody; `carry` is the collective's own copy and finishes it.
SOURCE = (Path(__file__).parent / "link_kernel.cu").read_text()
HOLD, CARRY = "torchweave_link_hold", "torchweave_link_carry"

# What one SM carries at least, bytes a nanosecond, before and since compute capability 9.0, which has an engine for
# bulk copies (measured on an H200: benchmarks/notes.md).
SM_BYTES_PER_NS = {False: 30.0, True: 45.0}
_BULK_COPIES_SINCE = 9

_MAX_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Function:
    """A function of the module with its arguments, which live here and are only set before a launch."""

    def __init__(self, *arguments: Any) -> None:
        self.handle, self.arguments = ctypes.c_void_p(), arguments
        self.pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))

    def set(self, *values: int) -> None:
        """Set the arguments of the next launch."""
        for argument, value in zip(self.arguments, values, strict=True):
            argument.value = value


class LinkKernel:
    """The compiled kernels on one device, ready to be launched in a few microseconds.

    Args:
        device: Index of the CUDA device.
        sms: How many SMs a collective holds.

    Raises:
        TorchweaveError: NVRTC or the driver cannot be loaded, or refuse the kernel.
    """

    def __init__(self, device: int, sms: int) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._driver = _load("libcuda.so.1", "the CUDA driver")
        self._sms, self._all_sms = sms, int(properties.multi_processor_count)
        self._sm_bytes_per_ns = SM_BYTES_PER_NS[properties.major >= _BULK_COPIES_SINCE]
        self._shared_bytes = int(getattr(properties, "shared_memory_per_block_optin", 48 * 1024))
        self._lock = threading.Lock()
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._hold = _Function(pointer(), pointer(), number(), number(), number(), number())
        self._carry = _Function(pointer(), pointer(), ctypes.c_longlong(), number())
        self._module = ctypes.c_void_p()
        image = compile_source(f"sm_{properties.major}{properties.minor}")
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))
            for function, name in ((self._hold, HOLD), (self._carry, CARRY)):
                found = self._driver.cuModuleGetFunction(ctypes.byref(function.handle), self._module, name.encode())
                self._check(found)
                self._check(
                    self._driver.cuFuncSetAttribute(function.handle, _MAX_DYNAMIC_SHARED_MEMORY, self._shared_bytes)
                )

    def hold(self, source: torch.Tensor, scratch: torch.Tensor, moved: int, duration_ns: int, stream: int) -> None:
        """Queue a hold of the link's SMs on a stream of its device, which must be the current device.

        Args:
            source: What is read, again from its beginning when it ends.
            scratch: What is written, aligned to 16 bytes, again from its beginning when it ends.
            moved: How many bytes to move, as far as so many SMs get by the deadline.
            duration_ns: How long the kernel lasts, counted from its start, ns.
            stream: The stream's handle.
        """
        # a source that is not aligned begins up to 15 bytes later
        source_vectors = max(_readable_bytes(source) - VECTOR_BYTES + 1, 0) // VECTOR_BYTES
        scratch_vectors = scratch.numel() * scratch.element_size() // VECTOR_BYTES
        values = (source.data_ptr(), scratch.data_ptr(), source_vectors, scratch_vectors, moved // VECTOR_BYTES)
        self._launch(self._hold, (*values, duration_ns), self._sms, stream)

    def carry(self, source: torch.Tensor, target: torch.Tensor, moved: int, duration_ns: int, stream: int) -> None:
        """Queue a copy that is the collective itself, on a stream of its device, which must be the current device.

        Args:
            source: What is read, contiguous and aligned to 16 bytes.
            target: What is written, likewise.
            moved: Bytes, a multiple of 16.
            duration_ns: How long the kernel lasts at least, counted from its start, ns.
            stream: The stream's handle.
        """
        values = (source.data_ptr(), target.data_ptr(), moved, duration_ns)
        self._launch(self._carry, values, self.sms_for(moved, duration_ns), stream)

    def sms_for(self, moved: int, duration_ns: int) -> int:
        """Return how many SMs `carry` holds: those of the link, or more where they could not finish in time."""
        needed = math.ceil(moved / max(duration_ns * self._sm_bytes_per_ns, 1.0))
        return max(self._sms, min(needed, self._all_sms))

    def part_held(self, moved: int, duration_ns: int) -> float:
        """Return which part of the device's SMs carrying so many bytes for so long holds."""
        return self.sms_for(moved, duration_ns) / self._all_sms

    def _launch(self, function: _Function, values: tuple[int, ...], sms: int, stream: int) -> None:
        with self._lock:  # the driver copies the arguments before it returns
            function.set(*values)
            grid, block = (sms, 1, 1), (NUM_THREADS, 1, 1)
            self._check(
                self._driver.cuLaunchKernel(
                    function.handle,
                    *grid,
                    *block,
                    self._shared_bytes,
                    ctypes.c_void_p(stream),
                    function.pointers,
                    None,
                )
            )

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise TorchweaveError(
                "The simulated link's kernel runs on the device",
                given=f"CUDA driver error {code}: {(text.value or b'unknown').decode()}",
            )


def compile_source(architecture: str) -> bytes:
    """Compile the kernel.

    Args:
        architecture: What to compile for, as in `sm_90`.

    Returns:
        The cubin.

    Raises:
        TorchweaveError: NVRTC cannot be loaded or refuses the source.
    """
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"torchweave_link.cu", 0, None, None)
    size = ctypes.c_size_t()
    if created or nvrtc.nvrtcCompileProgram(program, 1, options):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise TorchweaveError(
            "NVRTC compiles the simulated link's kernel",
            given=f"{architecture}: {log.value.decode(errors='replace')}",
            remedy="leave the simulated link off with --link-gbps 0",
        )
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def _readable_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes may be read from a tensor's first element on."""
    if not tensor.is_contiguous():
        return 0  # then the kernel holds its SMs and moves nothing
    return tensor.numel() * tensor.element_size()


def _load_nvrtc() -> ctypes.CDLL:
    """Load the NVRTC that came with torch: by its name, else from the packages that torch depends on."""
    major = (torch.version.cuda or "13").partition(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    found = importlib.util.find_spec("nvidia")
    folders = list(found.submodule_search_locations or []) if found else []
    names += [str(path) for folder in folders for path in sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise TorchweaveError(
        "The simulated link on a GPU needs NVRTC",
        given=f"none of {', '.join(names)} can be loaded",
        remedy="install torch with its CUDA packages, or leave the simulated link off with --link-gbps 0",
    )


def _load(name: str, what: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise TorchweaveError(
            f"The simulated link on a GPU needs {what}", given=str(error), remedy="use a machine with a CUDA device"
        ) from error
