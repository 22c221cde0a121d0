"""Asks torch and the driver, in a process of its own, and prints the answers as one line of JSON."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

# Source: cuda.h, CUdevice_attribute
_ASYNC_ENGINES = 40
_OPTIONS = ("profile_all_threads", "enable_cuda_sync_events")


def probe() -> dict[str, Any]:
    """Return what torch and the driver say; torch that is missing is no error."""
    found: dict[str, Any] = {"driver": _driver()}
    try:
        import torch
    except ModuleNotFoundError as error:
        return found if error.name == "torch" else {**found, "error": f"torch cannot be imported: {error}"}
    except Exception as error:  # a broken installation raises anything
        return {**found, "error": f"torch cannot be imported: {type(error).__name__}: {error}"}
    found |= {"torch": torch.__version__, "cuda": str(torch.version.cuda or torch.version.hip or "")}
    found["interception"], found["profiler"] = _interception(), _profiler(torch)
    try:
        found["available"] = torch.cuda.is_available()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if found["available"] else ""
        found["devices"] = [_device(torch, ordinal) for ordinal in range(torch.cuda.device_count())]
    except Exception as error:  # a broken device raises anything
        found["available"] = False
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _device(torch: Any, ordinal: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(ordinal)
    return {
        "name": properties.name,
        "num_sms": properties.multi_processor_count,
        "copy_engines": _attribute(_ASYNC_ENGINES, ordinal),
        "memory_bytes": properties.total_memory,
    }


def _library() -> Any:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if library.cuInit(0) == 0:
            return library
    return None


def _attribute(attribute: int, ordinal: int) -> int:
    """Return an attribute of a device, -1 where the driver does not say."""
    library = _library()
    value, device = ctypes.c_int(-1), ctypes.c_int(0)
    if library is None or library.cuDeviceGet(ctypes.byref(device), ordinal) != 0:
        return -1
    good = library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0
    return value.value if good else -1


def _driver() -> str:
    """Return the newest CUDA that the driver can run, empty where there is no driver."""
    library, value = _library(), ctypes.c_int(0)
    if library is None or library.cuDriverGetVersion(ctypes.byref(value)) != 0:
        return ""
    return f"CUDA {value.value // 1000}.{value.value % 1000 // 10}"


def _interception() -> str:
    """Return what this torch lacks of what `weave` replaces in it, empty for nothing."""
    try:
        from torchweave.doctor.interception import missing
    except Exception as error:  # whatever an unknown torch raises is the answer
        return f"{type(error).__name__}: {error}"
    return missing()


def _profiler(torch: Any) -> list[str]:
    found = []
    for option in _OPTIONS:
        try:
            torch._C._profiler._ExperimentalConfig(**{option: True})
        except (TypeError, AttributeError):
            continue
        found.append(option)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
