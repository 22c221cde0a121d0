"""What is known of a machine, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device.

    Attributes:
        name: The maker's name.
        num_sms: Multiprocessors, -1 where not known.
        copy_engines: Copies that can run at once beside kernels, -1 where not known.
        memory_bytes: Its memory, -1 where not known.
    """

    name: str
    num_sms: int = -1
    copy_engines: int = -1
    memory_bytes: int = -1


@dataclass(frozen=True, slots=True)
class Measured:
    """What a short measurement on the device said; None where it was not made.

    Attributes:
        launch_us: Host time of one small operator.
        kernels: Two kernels with room for each other, at once over one after the other: 0.5 is best, 1 is none.
        copies: An upload beside a kernel, likewise.
        both_ways: An upload beside a download, likewise.
        collective: A collective of all devices beside a kernel, likewise.
        seconds: How long it took.
    """

    launch_us: float | None = None
    kernels: float | None = None
    copies: float | None = None
    both_ways: float | None = None
    collective: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that the judgement needs.

    Attributes:
        environment: Variables that decide about overlap.
        python: Python's version.
        system: The operating system, in words.
        is_wsl: Whether it is Linux under Windows.
        driver: The driver's version, empty where not known.
        torch: torch's version, empty where it is missing.
        cuda: The CUDA (or HIP) that torch was built for, empty for a build without one.
        nccl: NCCL's version, empty where there is none.
        available: Whether torch can use a device; None where torch is missing or did not answer.
        error: What went wrong with torch or the device, empty for nothing.
        devices: The devices that torch sees.
        mps: Whether the multi-process service runs, None where not known.
        others: Other processes on the devices, None where not known.
        interception: What is missing of what `weave` has to replace in this torch, empty for nothing, None where not
            looked at.
        profiler: Which recording options this torch has.
        measured: The measurement, None where there was none.
        measure_error: Why there was none.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    system: str = ""
    is_wsl: bool = False
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    available: bool | None = None
    error: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    mps: bool | None = None
    others: tuple[str, ...] | None = None
    interception: str | None = None
    profiler: tuple[str, ...] = ()
    measured: Measured | None = None
    measure_error: str = ""
