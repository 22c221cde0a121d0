"""The records of a trace: what ran on each device, who launched it, and what the host did meanwhile.

All times are integer nanoseconds since the trace's origin. Every table is a set of numpy columns of one length;
"-1" in an index or number column means "not recorded". Names are codes into `Timeline.names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchweave.trace.log import Log

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

# the values of `Work.kind`
KERNEL, COPY, MEMSET = 0, 1, 2
# the values of `Work.direction`, for copies
HOST_TO_DEVICE, DEVICE_TO_HOST, ON_DEVICE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Work:
    """Operations on devices (kernels, copies, memsets), sorted by begin.

    Attributes:
        begin: Start on the device, ns.
        end: End on the device, ns.
        device: Device ordinal.
        stream: Stream number, as the recorder counts them.
        kind: KERNEL, COPY or MEMSET.
        name: Code of the operation's name.
        direction: HOST_TO_DEVICE, DEVICE_TO_HOST or ON_DEVICE for copies, else -1.
        pageable: True where a copy's host side is not pinned.
        num_bytes: Bytes of a copy or memset, else -1.
        correlation: Number that joins the operation with its launch call.
        call: Row of the launch call in `Timeline.calls`, -1 where it was not recorded.
        op: Row of the innermost operator around the launch in `Timeline.ops`, or -1.
        backward: True where autograd's engine launched it.
        blocks: Thread blocks of the grid, -1 where not recorded.
        threads: Threads of a block, -1 where not recorded.
        registers: Registers of a thread, -1 where not recorded.
        shared_bytes: Shared memory of a block, bytes, -1 where not recorded.
        collective: Code of the collective's name, -1 for work that is none.
        group: Code of the collective's process group, or -1.
        elements: Elements of the collective's larger message, or -1.
        element_bytes: Bytes of one element, or -1.
    """

    begin: Ints
    end: Ints
    device: Ints
    stream: Ints
    kind: Ints
    name: Ints
    direction: Ints
    pageable: Flags
    num_bytes: Ints
    correlation: Ints
    call: Ints
    op: Ints
    backward: Flags
    blocks: Ints
    threads: Ints
    registers: Ints
    shared_bytes: Ints
    collective: Ints
    group: Ints
    elements: Ints
    element_bytes: Ints

    def __len__(self) -> int:
        return len(self.begin)


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of the runtime and the driver, sorted by begin.

    Attributes:
        begin: Start on the host, ns.
        end: End on the host, ns.
        thread: Code of the thread on which the call's operators are recorded (the recorder can number it twice).
        name: Code of the call's name.
        correlation: Number that joins the call with its device operation.
        op: Row of the innermost operator around the call, or -1.
        engine: True on a thread of autograd's engine.
    """

    begin: Ints
    end: Ints
    thread: Ints
    name: Ints
    correlation: Ints
    op: Ints
    engine: Flags

    def __len__(self) -> int:
        return len(self.begin)


@dataclass(frozen=True, slots=True)
class Ops:
    """Operators and annotations on the host, sorted by thread, then begin, outer ones first.

    Attributes:
        begin: Start on the host, ns.
        end: End on the host, ns.
        thread: Code of the thread.
        name: Code of the operator's name.
        external: The recorder's number of this operator.
        sequence: Autograd's sequence number, or -1.
        parent: Row of the operator around this one, or -1.
        backward: True inside autograd's engine.
    """

    begin: Ints
    end: Ints
    thread: Ints
    name: Ints
    external: Ints
    sequence: Ints
    parent: Ints
    backward: Flags

    def __len__(self) -> int:
        return len(self.begin)


@dataclass(frozen=True, slots=True)
class Spans:
    """Named times on one thread each: Python frames, annotations, overhead; sorted by begin.

    Attributes:
        begin: Start, ns.
        end: End, ns.
        thread: Code of the thread, -1 where it has none.
        name: Code of the name.
    """

    begin: Ints
    end: Ints
    thread: Ints
    name: Ints

    def __len__(self) -> int:
        return len(self.begin)


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of streams for events, where the recording has them, sorted by the time of the call.

    Attributes:
        begin: When the host asked for the wait, ns.
        stream: The stream that waits.
        correlation: Number of the call that asked for the wait.
        record_correlation: Number of the call that recorded the event, or -1.
        on_stream: The stream that the event was recorded on, or -1.
    """

    begin: Ints
    stream: Ints
    correlation: Ints
    record_correlation: Ints
    on_stream: Ints

    def __len__(self) -> int:
        return len(self.begin)


@dataclass(frozen=True, slots=True)
class Device:
    """What a trace says about a device; -1 where it does not.

    Attributes:
        ordinal: Its number.
        name: The maker's name for it.
        num_sms: Multiprocessors.
        registers_per_sm: Registers of a multiprocessor.
        shared_bytes_per_sm: Shared memory of a multiprocessor.
        threads_per_sm: Resident threads of a multiprocessor at most.
        warp_size: Threads of a warp.
    """

    ordinal: int
    name: str
    num_sms: int = -1
    registers_per_sm: int = -1
    shared_bytes_per_sm: int = -1
    threads_per_sm: int = -1
    warp_size: int = 32


@dataclass(frozen=True, slots=True)
class Timeline:
    """One trace, read and joined.

    Attributes:
        file: The file as the user named it.
        format: `kineto` or `nsys`.
        rank: The rank that recorded it, None where it does not say.
        world_size: Ranks of the job, None where it does not say.
        origin_ns: What zero is on the recorder's own clock, ns.
        names: The strings that the `name` columns refer to.
        threads: Names of the threads that the `thread` columns refer to.
        work: Operations on devices.
        calls: Runtime and driver calls.
        ops: Operators on the host.
        frames: Python frames.
        annotations: User annotations on the host.
        overhead: The recorder's own costs and module loading.
        waits: Waits of streams for events.
        devices: The devices by ordinal.
        metadata: Other values of the file's head, as text.
        warnings: What was wrong with the file and how it was read in spite of it.
        log: What a watched run wrote down beside the trace, None for a trace alone.
        streams: For each CUDA stream of the log, the recorder's number of it, where work shows it.
    """

    file: str
    format: str
    rank: int | None
    world_size: int | None
    origin_ns: int
    names: tuple[str, ...]
    threads: tuple[str, ...]
    work: Work
    calls: Calls
    ops: Ops
    frames: Spans
    annotations: Spans
    overhead: Spans
    waits: Waits
    devices: Mapping[int, Device]
    metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    log: Log | None = None
    streams: Mapping[int, int] = field(default_factory=dict)
