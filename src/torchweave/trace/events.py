"""The rows of a Chrome trace as Kineto writes it: typed for fast decoding, and what their categories mean.

Source: pytorch/kineto, `ActivityType.h`, `MetadataFieldCatalog.h`, `output_json.cpp`.
"""

from __future__ import annotations

from typing import Any

import msgspec

WORK, CALL, OP, FRAME, ANNOTATION, OVERHEAD, WAIT = range(7)

# Category names of 2021 to 2026, of CUDA and ROCm builds, in lower case. Everything else (flows, counters, the rows
# that repeat annotations on the device) is left out: launches are joined by correlation, never by arrows.
CATEGORIES = {
    "kernel": WORK,
    "gpu_memcpy": WORK,
    "gpu_memset": WORK,
    "memcpy": WORK,
    "memset": WORK,
    "hip_kernel": WORK,
    "cuda_runtime": CALL,
    "cuda_driver": CALL,
    "runtime": CALL,
    "hip_runtime": CALL,
    "hip_driver": CALL,
    "cpu_op": OP,
    "operator": OP,
    "python_function": FRAME,
    "python": FRAME,
    "user_annotation": ANNOTATION,
    "overhead": OVERHEAD,
    "cuda_sync": WAIT,
}


class Args(msgspec.Struct, gc=False):
    """The arguments of a row that are read; `Any`, because versions disagree on their types."""

    correlation: Any = -1
    external: Any = msgspec.field(default=-1, name="External id")
    external_old: Any = msgspec.field(default=-1, name="external id")
    device: Any = None
    stream: Any = None
    num_bytes: Any = msgspec.field(default=-1, name="bytes")
    grid: Any = None
    block: Any = None
    registers: Any = msgspec.field(default=-1, name="registers per thread")
    shared: Any = msgspec.field(default=-1, name="shared memory")
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    elements_in: Any = msgspec.field(default=-1, name="In msg nelems")
    elements_out: Any = msgspec.field(default=-1, name="Out msg nelems")
    dtype: Any = None
    sync_kind: Any = msgspec.field(default=None, name="cuda_sync_kind")
    wait_on_stream: Any = -1
    record_correlation: Any = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")


class Event(msgspec.Struct, gc=False):
    """One row of a Chrome trace."""

    ph: Any = None
    cat: Any = None
    name: Any = ""
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = 0
    args: Args | None = None


class Document(msgspec.Struct):
    """A whole trace file, or its first or last piece with the metadata that lies there."""

    events: list[Event] = msgspec.field(default_factory=list, name="traceEvents")
    device_properties: Any = msgspec.field(default=None, name="deviceProperties")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    base_ns: Any = msgspec.field(default=0, name="baseTimeNanoseconds")
    schema: Any = msgspec.field(default=None, name="schemaVersion")
    with_stack: Any = None
    runtime_version: Any = msgspec.field(default=None, name="cuda_runtime_version")
    hip_version: Any = msgspec.field(default=None, name="hip_runtime_version")
    launch_blocking: Any = msgspec.field(default=None, name="CUDA_LAUNCH_BLOCKING")
    max_connections: Any = msgspec.field(default=None, name="CUDA_DEVICE_MAX_CONNECTIONS")
    module_loading: Any = msgspec.field(default=None, name="CUDA_MODULE_LOADING")


# the width of the element types that collectives name, bytes
ELEMENT_BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "Float": 4,
    "Int": 4,
    "Double": 8,
    "Long": 8,
}
