"""IDEA: the kernel that plays a link on a GPU, compiled by NVRTC and launched through the driver.

Every collective launches it once, so the launch is prepared: arguments live in ctypes objects that are only set.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from pathlib import Path

import torch

from torchweave.errors import TorchweaveError

NAME = "torchweave_link"
NUM_THREADS = 1024
VECTOR_BYTES = 16
# The duration travels as a C int of nanoseconds.
LONGEST_NS = 2_000_000_000

# Each block takes its SM for itself (maximal shared memory), copies its share no faster than the link would, and
# leaves at the deadline, even where one SM could not copy everything by then.
SOURCE = r"""
__device__ __forceinline__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

extern "C" __global__ void torchweave_link(const uint4* source, uint4* scratch, int source_vectors,
                                           int scratch_vectors, int vectors, int duration_ns) {
  const unsigned long long begin = now();
  const unsigned long long end = begin + (unsigned long long)duration_ns;
  const double pace = vectors > 0 ? (double)duration_ns / (double)vectors : 0.0;
  const long long step = (long long)gridDim.x * blockDim.x;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  // a misaligned source loses less than one vector
  const uint4* aligned = (const uint4*)(((unsigned long long)source + 15ULL) & ~15ULL);
  if (source_vectors > 0) {
    for (long long i = first; i < vectors; i += 4 * step) {
      const unsigned long long due = begin + (unsigned long long)(pace * (double)i);
      while (now() < due) __nanosleep(200);
      if (now() >= end) break;
      uint4 moved[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const long long at = i + k * step;
        if (at < vectors) moved[k] = aligned[(unsigned int)at % (unsigned int)source_vectors];
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const long long at = i + k * step;
        if (at < vectors) scratch[(unsigned int)at % (unsigned int)scratch_vectors] = moved[k];
      }
    }
  }
  while (now() < end) __nanosleep(100);
}
"""

_MAX_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class LinkKernel:
    """The compiled kernel on one device, ready to be launched in a few microseconds.

    Args:
        device: Index of the CUDA device.
        sms: How many SMs it holds: blocks of the grid.

    Raises:
        TorchweaveError: NVRTC or the driver cannot be loaded, or refuse the kernel.
    """

    def __init__(self, device: int, sms: int) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._driver = _load("libcuda.so.1", "the CUDA driver")
        self._sms = sms
        self._shared_bytes = int(getattr(properties, "shared_memory_per_block_optin", 48 * 1024))
        self._lock = threading.Lock()
        self._pointers = (ctypes.c_void_p(), ctypes.c_void_p())
        self._numbers = tuple(ctypes.c_int() for _ in range(4))
        arguments = (*self._pointers, *self._numbers)
        self._arguments = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        image = compile_source(f"sm_{properties.major}{properties.minor}")
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))
            self._check(
                self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, NAME.encode()),
            )
            self._check(self._driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_MEMORY, self._shared_bytes))

    def launch(self, source: torch.Tensor, scratch: torch.Tensor, moved: int, duration_ns: int, stream: int) -> None:
        """Queue the kernel on a stream of its device, which must be the current device.

        Args:
            source: What is read, again from its beginning when it ends.
            scratch: What is written, aligned to 16 bytes, again from its beginning when it ends.
            moved: How many bytes to move.
            duration_ns: How long the kernel lasts, counted from its start, ns.
            stream: The stream's handle.
        """
        readable = _readable_bytes(source)
        with self._lock:  # the driver copies the arguments before it returns
            self._pointers[0].value, self._pointers[1].value = source.data_ptr(), scratch.data_ptr()
            self._numbers[0].value = max(readable - VECTOR_BYTES + 1, 0) // VECTOR_BYTES
            self._numbers[1].value = scratch.numel() * scratch.element_size() // VECTOR_BYTES
            self._numbers[2].value = moved // VECTOR_BYTES
            self._numbers[3].value = duration_ns
            grid, block = (self._sms, 1, 1), (NUM_THREADS, 1, 1)
            handle = ctypes.c_void_p(stream)
            self._check(
                self._driver.cuLaunchKernel(
                    self._function, *grid, *block, self._shared_bytes, handle, self._arguments, None
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
