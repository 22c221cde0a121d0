"""From facts to answers: each with ok, bad or unknown, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchweave.doctor.machine import DeviceFacts, Machine, Measured

State: TypeAlias = Literal["ok", "bad", "unknown"]

LEAST_TORCH = (2, 10)
# Source: CUDA Programming Guide, "Environment variables": 1 to 32 connections, 8 where nothing is set
_DEFAULT_CONNECTIONS, _MOST_CONNECTIONS = 8, 32
# two things at once that take less of their time one after the other overlap
_OVERLAPS = 0.8
# an operator that takes the host longer than this is slow to launch
_SLOW_LAUNCH_US = 20.0
_ON = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that decides about overlap.

    Attributes:
        name: What.
        state: `ok`, `bad` or `unknown`.
        value: What was found.
        why: Why that is so, and what to do where it is bad.
    """

    name: str
    state: State
    value: str
    why: str


def judge(machine: Machine) -> tuple[Check, ...]:
    """Return what decides about overlap on a machine.

    Args:
        machine: The facts.
    """
    return (
        *_software(machine),
        *_devices(machine),
        *_variables(machine),
        *_sharing(machine),
        *_nccl_settings(machine),
        _interception(machine),
        _profiler(machine),
        *_measurement(machine),
    )


def _software(machine: Machine) -> Iterator[Check]:
    if machine.is_wsl:
        yield Check("system", "bad", machine.system, "Under Windows launches are sent in batches: they overlap less.")
    else:
        yield Check("system", "ok" if machine.system else "unknown", machine.system or "?", f"Python {machine.python}.")
    yield _version("driver", machine.driver, "the driver's own tool (nvidia-smi) was not found, or did not answer")
    if not machine.torch:
        why = machine.error or "torch is not installed here: `pip install torch`; traces can be read without it."
        yield Check("torch", "unknown", "not installed" if not machine.error else "?", why)
    elif _numbers(machine.torch)[:2] < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        yield Check("torch", "bad", machine.torch, f"`weave` needs torch {least} or later.")
    else:
        yield Check("torch", "ok", machine.torch, "It is a version that `weave` knows.")
    yield _cuda(machine)
    why = "it is a build without NCCL, or without CUDA" if machine.torch else "torch is not installed"
    yield _version("NCCL", machine.nccl, why)


def _version(name: str, value: str, missing: str) -> Check:
    return Check(name, "ok", value, "Known.") if value else Check(name, "unknown", "?", f"Not known: {missing}.")


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(digits) if (digits := "".join(filter(str.isdigit, part))) else 0 for part in parts[:3])


def _cuda(machine: Machine) -> Check:
    if machine.available is None:
        return Check("CUDA", "unknown", "?", machine.error or "torch is not installed, so it was not asked.")
    if machine.available:
        return Check("CUDA", "ok", machine.cuda, "torch can use the device.")
    if not machine.cuda:
        return Check("CUDA", "unknown", "none", "This torch was built without CUDA: nothing runs on a device here.")
    why = machine.error or "There is no device, or the driver does not fit."
    return Check("CUDA", "bad", machine.cuda, f"torch was built for CUDA and cannot use a device: {why}")


def _devices(machine: Machine) -> Iterator[Check]:
    if not machine.devices:
        yield Check("devices", "unknown", "none", "No device was found: nothing can be said of it.")
    for row, device in enumerate(machine.devices):
        sms = f", {device.num_sms} SMs" if device.num_sms > 0 else ""
        memory = f", {device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes > 0 else ""
        yield Check(f"device {row}", "ok", f"{device.name}{sms}{memory}", "Kernels that fill all SMs leave no room.")
        yield _copy_engines(row, device)


def _copy_engines(row: int, device: DeviceFacts) -> Check:
    name, number = f"device {row}: copy engines", device.copy_engines
    if number < 0:
        return Check(name, "unknown", "?", "The driver was not asked.")
    if number == 0:
        return Check(name, "bad", "0", "Copies do not run beside kernels on this device.")
    why = "Copies run beside kernels" + (
        ", up and down at once." if number > 1 else "; an upload and a download take turns."
    )
    return Check(name, "ok" if number > 1 else "bad", str(number), why)


def _variables(machine: Machine) -> Iterator[Check]:
    yield _connections(machine.environment.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    blocking = machine.environment.get("CUDA_LAUNCH_BLOCKING", "")
    if blocking not in ("", "0"):
        yield Check(
            "launch blocking", "bad", blocking, "Every launch waits for its kernel: unset CUDA_LAUNCH_BLOCKING."
        )
    else:
        yield Check("launch blocking", "ok", "off", "Launches return at once.")
    loading = machine.environment.get("CUDA_MODULE_LOADING", "")
    if loading.upper() == "EAGER":
        yield Check("module loading", "ok", loading, "Kernels are loaded when the program starts.")
    else:
        why = "A kernel is loaded at its first launch, which can hold everything up: warm up with the real shapes."
        yield Check("module loading", "ok", loading or "lazy (default)", why)
    yield _allocator(machine)


def _connections(text: str | None) -> Check:
    name = "connections"
    if text is None:
        why = f"{_DEFAULT_CONNECTIONS} hardware queues; with more streams at work some share one."
        return Check(name, "ok", f"{_DEFAULT_CONNECTIONS} (default)", why)
    number = int(text) if text.strip().isdigit() else 0
    if not 1 <= number <= _MOST_CONNECTIONS:
        return Check(name, "bad", text, f"CUDA_DEVICE_MAX_CONNECTIONS is a number from 1 to {_MOST_CONNECTIONS}.")
    if number == 1:
        why = (
            "All streams share one hardware queue and run in the order of issue. Megatron asks for that with tensor "
            "parallelism on Hopper and older; for other overlap set CUDA_DEVICE_MAX_CONNECTIONS=8 or more."
        )
        return Check(name, "bad", text, why)
    return Check(name, "ok", text, f"{number} hardware queues.")


def _allocator(machine: Machine) -> Check:
    name, environment = "allocator", machine.environment
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "") not in ("", "0"):
        why = "Every allocation asks the driver, and every free waits for the device: unset it."
        return Check(name, "bad", "PYTORCH_NO_CUDA_MEMORY_CACHING", why)
    settings = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if not settings:
        return Check(name, "ok", "caching (default)", "A stream's first allocations ask the driver; later ones do not.")
    return Check(name, "ok", settings, "Memory is cached, with these settings.")


def _sharing(machine: Machine) -> Iterator[Check]:
    mps = {True: "on", False: "off", None: "?"}[machine.mps]
    why = "Processes share the device at the same time." if machine.mps else "Processes take turns on the device."
    yield Check(
        "MPS", "unknown" if machine.mps is None else "ok", mps, why if machine.mps is not None else "Not known."
    )
    if machine.others is None:
        yield Check("other processes", "unknown", "?", "The driver's own tool (nvidia-smi) did not say.")
    elif machine.others:
        state: State = "ok" if machine.mps else "bad"
        told = "; ".join(machine.others)
        why = "They work at the same time." if machine.mps else "Without MPS they take turns with yours: measure alone."
        yield Check("other processes", state, told, why)
    else:
        yield Check("other processes", "ok", "none", "The devices are yours alone.")


def _nccl_settings(machine: Machine) -> Iterator[Check]:
    environment = machine.environment
    found = {name: value for name, value in environment.items() if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    bad = []
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if found.get(name, "").lower() in _ON:
            bad.append(f"{name} makes `wait()` hold the host until the collective has ended")
    single = environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if found.get("TORCH_NCCL_ENABLE_TIMING", "").lower() in _ON and single:
        # Source: pytorch/pytorch issue 143890
        bad.append("TORCH_NCCL_ENABLE_TIMING with one connection breaks all overlap")
    if found.get("NCCL_LAUNCH_MODE", "").upper() == "GROUP":
        bad.append("NCCL_LAUNCH_MODE=GROUP synchronizes the launches of a process's devices")
    value = ", ".join(f"{name}={text}" for name, text in sorted(found.items())) or "none set"
    yield Check(
        "NCCL settings", "bad" if bad else "ok", value, "; ".join(bad) + "." if bad else "None stands in the way."
    )


def _interception(machine: Machine) -> Check:
    name = "interception"
    if machine.interception is None:
        return Check(name, "unknown", "?", "torch was not there, or did not answer: `weave` could not be tried.")
    if machine.interception:
        return Check(name, "bad", "not with this torch", machine.interception)
    return Check(name, "ok", "works", "`weave` finds the collectives of this torch.")


def _profiler(machine: Machine) -> Check:
    name = "recording"
    if machine.interception is None and not machine.profiler:
        return Check(name, "unknown", "?", "torch was not there, or did not answer.")
    missing = [
        option for option in ("profile_all_threads", "enable_cuda_sync_events") if option not in machine.profiler
    ]
    if missing:
        return Check(
            name, "bad", ", ".join(machine.profiler) or "none", f"This torch cannot record {', '.join(missing)}."
        )
    return Check(name, "ok", ", ".join(machine.profiler), "`torchweave why SCRIPT` sees all threads, and waits.")


def _measurement(machine: Machine) -> Iterator[Check]:
    measured = machine.measured
    if measured is None:
        yield Check("measurement", "unknown", "none", machine.measure_error or "There is no device to measure.")
        return
    launch = measured.launch_us
    if launch is None:
        yield Check("launch cost", "unknown", "?", "It was not measured.")
    else:
        slow = launch > _SLOW_LAUNCH_US
        why = (
            f"Kernels shorter than this cannot overlap: the host does not launch them faster than {launch:.1f} us each."
        )
        yield Check("launch cost", "bad" if slow else "ok", f"{launch:.1f} us an operator", why)
    yield from _overlaps(machine, measured)


def _overlaps(machine: Machine, measured: Measured) -> Iterator[Check]:
    rows = (
        ("kernel overlap", measured.kernels, "two kernels with room for each other"),
        ("copy overlap", measured.copies, "an upload and a kernel"),
        ("copies both ways", measured.both_ways, "an upload and a download"),
        ("collective overlap", measured.collective, "a collective and a kernel"),
    )
    for name, value, what in rows:
        if value is None:
            alone = name == "collective overlap" and len(machine.devices) < 2
            yield Check(name, "unknown", "?", "It takes two devices." if alone else "It was not measured.")
            continue
        state: State = "ok" if value < _OVERLAPS else "bad"
        why = f"{what[0].upper()}{what[1:]} on two streams take {value:.2f} of their time one after the other."
        yield Check(name, state, f"{value:.2f}", why + (" Look at the lines above for why." if state == "bad" else ""))
