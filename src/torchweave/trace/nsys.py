"""Nsight Systems `.sqlite` exports to a `Timeline`: the CUPTI_ACTIVITY_KIND_* tables of the schemas of 2022 to 2025.

Source: Nsight Systems user guide, "SQLite schema reference". Columns differ between versions, so each is asked for
by name and missing ones count as not recorded.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from torchweave.errors import UnreadableInputError
from torchweave.trace import link
from torchweave.trace.export import Export
from torchweave.trace.timeline import (
    COPY,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    KERNEL,
    MEMSET,
    ON_DEVICE,
    Calls,
    Device,
    Flags,
    Ints,
    Ops,
    Spans,
    Timeline,
    Waits,
    Work,
)

_PREFIX = "CUPTI_ACTIVITY_KIND_"
# CUpti_ActivityMemcpyKind, and the export's own ENUM_CUDA_MEM_KIND, which is not CUPTI's: it begins at 0
_HTOD, _DTOH = 1, 2
_COPY_NAMES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_MEMORY_NAMES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
_STREAM_WAIT_EVENT = 2
# NVTX_EVENTS.eventType of a range between push and pop, and of one between start and end
_RANGES = (59, 60)


def read_nsys(path: Path) -> Timeline:
    """Read an export.

    Args:
        path: The `.sqlite` file.

    Returns:
        The trace's tables; there are no operators in them, since nsys does not know any.

    Raises:
        UnreadableInputError: It is damaged, or not an export of Nsight Systems.
    """
    try:
        export = Export(path)
        try:
            return _timeline(export)
        finally:
            export.base.close()
    except (sqlite3.Error, ValueError, OverflowError, TypeError) as error:
        raise UnreadableInputError(
            "An .sqlite file has to be an intact export of Nsight Systems",
            given=f"{path}: {error}",
            remedy="export it again with `nsys export --type sqlite`",
        ) from error


def _timeline(export: Export) -> Timeline:
    if not any(name.startswith(_PREFIX) for name in export.tables):
        known = ", ".join(sorted(export.tables)[:8]) or "none"
        raise UnreadableInputError(
            "An nsys export has to hold CUPTI_ACTIVITY_KIND_* tables",
            given=f"{export.path}: tables {known}",
            remedy="record with `nsys profile --trace cuda,nvtx` and export with `--type sqlite`",
        )
    calls = _calls(export)
    work = _work(export, calls)
    origin = int(min(work.begin.min(initial=2**62), calls.begin.min(initial=2**62)))
    origin = 0 if origin == 2**62 else origin
    notes, waits = _notes(export), _waits(export, calls)
    top = 1 + int(max(calls.thread.max(initial=-1), notes.thread.max(initial=-1)))
    for table in (work, calls, notes):
        for column in (table.begin, table.end):
            column -= origin
    waits.begin[:] -= origin
    empty = np.zeros(0, dtype=np.int64)
    return Timeline(
        file=str(export.path),
        format="nsys",
        rank=None,
        world_size=None,
        origin_ns=origin,
        names=tuple(export.codes),
        threads=tuple(str(code) for code in range(top)),
        work=work,
        calls=calls,
        ops=Ops(*(empty,) * 7, backward=np.zeros(0, dtype=np.bool_)),
        frames=Spans(*(empty,) * 4),
        annotations=notes,
        overhead=_overhead(export, origin),
        waits=waits,
        devices=_devices(export),
        metadata={},
        warnings=(),
    )


def _threads(export: Export, ids: Ints) -> Ints:
    """Return codes of threads; the export's own numbers hold process and thread in one."""
    return export.code([f"thread {number % 0x1000000}" for number in ids.tolist()])


def _calls(export: Export) -> Calls:
    columns = export.columns(f"{_PREFIX}RUNTIME", ("start", "end", "globalTid", "correlationId", "nameId"))
    order = np.argsort(columns["start"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    # the export versions its names: cudaLaunchKernel_v7000
    names = [export.strings.get(number, str(number)) for number in columns["nameId"].tolist()]
    size = len(order)
    return Calls(
        begin=columns["start"],
        end=columns["end"],
        thread=_threads(export, columns["globalTid"]),
        name=export.code([name.split("_v")[0] for name in names]),
        correlation=columns["correlationId"],
        op=np.full(size, -1, dtype=np.int64),
        engine=np.zeros(size, dtype=np.bool_),
    )


def _work(export: Export, calls: Calls) -> Work:
    common = ("start", "end", "deviceId", "streamId", "correlationId")
    shape = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
    memory = ("staticSharedMemory", "dynamicSharedMemory")
    kernels = export.columns(f"{_PREFIX}KERNEL", (*common, "demangledName", "shortName", *shape, *memory))
    copies = export.columns(f"{_PREFIX}MEMCPY", (*common, "bytes", "copyKind", "srcKind", "dstKind"))
    sets = export.columns(f"{_PREFIX}MEMSET", (*common, "bytes"))
    sizes = [len(table["start"]) for table in (kernels, copies, sets)]
    name = _work_names(export, kernels, copies, sizes[2])
    merged = {key: np.concatenate([table[key] for table in (kernels, copies, sets)]) for key in common}
    order = np.lexsort((merged["end"], merged["start"]))

    def spread(kernel: Ints | int, copy: Ints | int, memset: Ints | int) -> Ints:
        parts = [np.broadcast_to(part, (size,)) for part, size in zip((kernel, copy, memset), sizes, strict=True)]
        return np.concatenate(parts).astype(np.int64)[order]

    direction, pageable = _copy_kinds(copies, export.labels("ENUM_CUDA_MEM_KIND", _MEMORY_NAMES))
    nothing = np.full(len(order), -1, dtype=np.int64)
    correlation = merged["correlationId"][order]
    return Work(
        begin=merged["start"][order],
        end=np.maximum(merged["end"], merged["start"])[order],
        device=np.maximum(merged["deviceId"], 0)[order],
        stream=merged["streamId"][order],
        kind=spread(KERNEL, COPY, MEMSET),
        name=name[order],
        direction=spread(-1, direction, -1),
        pageable=spread(0, pageable.astype(np.int64), 0) == 1,
        num_bytes=spread(-1, copies["bytes"], sets["bytes"]),
        correlation=correlation,
        call=link.rows_of(correlation, calls.correlation),
        op=nothing,
        backward=np.zeros(len(order), dtype=np.bool_),
        blocks=spread(_product(kernels, "gridX", "gridY", "gridZ"), -1, -1),
        threads=spread(_product(kernels, "blockX", "blockY", "blockZ"), -1, -1),
        registers=spread(kernels["registersPerThread"], -1, -1),
        shared_bytes=spread(
            np.maximum(kernels["staticSharedMemory"], 0) + np.maximum(kernels["dynamicSharedMemory"], 0), -1, -1
        ),
        collective=nothing,
        group=nothing,
        elements=nothing,
        element_bytes=nothing,
    )


def _work_names(export: Export, kernels: dict[str, Ints], copies: dict[str, Ints], num_sets: int) -> Ints:
    named = np.where(kernels["demangledName"] >= 0, kernels["demangledName"], kernels["shortName"])
    copied, memset = (
        export.code(_copy_names(copies, export.labels("ENUM_CUDA_MEM_KIND", _MEMORY_NAMES))),
        export.code(["Memset (Device)"] * num_sets),
    )
    return np.concatenate((export.names(named), copied, memset))


def _copy_kinds(copies: dict[str, Ints], kinds: Mapping[int, str]) -> tuple[Ints, Flags]:
    """Return the direction of each copy, and whether its host side is pageable."""
    kind = copies["copyKind"]
    direction = np.select([kind == _HTOD, kind == _DTOH], [HOST_TO_DEVICE, DEVICE_TO_HOST], ON_DEVICE)
    numbers = [number for number, text in kinds.items() if "pageable" in text.lower()]
    pageable = np.isin(copies["srcKind"], numbers) | np.isin(copies["dstKind"], numbers)
    return direction, np.asarray(pageable & (direction != ON_DEVICE))


def _product(columns: dict[str, Ints], *names: str) -> Ints:
    values = [columns[name] for name in names]
    known = np.logical_and.reduce([value > 0 for value in values])
    return np.where(known, values[0] * values[1] * values[2], -1)


def _copy_names(copies: dict[str, Ints], kinds: Mapping[int, str]) -> list[str]:
    """Return names as Kineto writes them: `Memcpy HtoD (Pageable -> Device)`."""
    rows = zip(*(copies[name].tolist() for name in ("copyKind", "srcKind", "dstKind")), strict=True)
    return [
        f"Memcpy {_COPY_NAMES.get(kind, 'other')} ({kinds.get(source, 'Unknown')} -> {kinds.get(target, 'Unknown')})"
        for kind, source, target in rows
    ]


def _notes(export: Export) -> Spans:
    columns = export.columns("NVTX_EVENTS", ("start", "end", "eventType", "textId", "globalTid"))
    keep = np.isin(columns["eventType"], _RANGES) & (columns["end"] > columns["start"])
    texts = _note_texts(export, columns["textId"])
    name = export.code([text for text, kept in zip(texts, keep.tolist(), strict=True) if kept])
    columns = {key: column[keep] for key, column in columns.items()}
    order = np.argsort(columns["start"], kind="stable")
    thread = _threads(export, columns["globalTid"])
    return Spans(columns["start"][order], columns["end"][order], thread[order], name[order])


def _note_texts(export: Export, ids: Ints) -> list[str]:
    """Return the texts of annotations: kept in the row itself or in the table of strings."""
    known = {row[1] for row in export.base.execute("PRAGMA table_info(NVTX_EVENTS)")}
    own = export.base.execute("SELECT text FROM NVTX_EVENTS").fetchall() if "text" in known else []
    texts = [row[0] for row in own] or [None] * len(ids)
    return [text or export.strings.get(number, "?") for text, number in zip(texts, ids.tolist(), strict=True)]


def _waits(export: Export, calls: Calls) -> Waits:
    """Return the waits of streams; they are joined to records by `eventSyncId`, since `eventId` is used again."""
    wanted = ("start", "syncType", "streamId", "correlationId", "eventSyncId")
    waits = export.columns(f"{_PREFIX}SYNCHRONIZATION", wanted)
    records = export.columns(f"{_PREFIX}CUDA_EVENT", ("eventSyncId", "streamId", "correlationId"))
    keep = waits["syncType"] == _STREAM_WAIT_EVENT
    call = link.rows_of(waits["correlationId"], calls.correlation)
    begin = np.where(call >= 0, calls.begin[call], waits["start"]) if len(calls) else waits["start"]
    order = np.flatnonzero(keep)[np.argsort(begin[keep], kind="stable")]
    record = link.rows_of(waits["eventSyncId"], records["eventSyncId"])
    found = record >= 0

    def of_record(name: str) -> Ints:
        column = np.append(records[name], -1)
        return column[np.where(found, record, -1)][order]

    return Waits(
        begin=begin[order].copy(),
        stream=waits["streamId"][order],
        correlation=waits["correlationId"][order],
        record_correlation=of_record("correlationId"),
        on_stream=of_record("streamId"),
    )


def _overhead(export: Export, origin: int) -> Spans:
    columns = export.columns("PROFILER_OVERHEAD", ("start", "end", "nameId"))
    order = np.argsort(columns["start"], kind="stable")
    name = export.names(columns["nameId"][order])
    thread = np.full(len(order), -1, dtype=np.int64)
    return Spans(columns["start"][order] - origin, columns["end"][order] - origin, thread, name)


def _devices(export: Export) -> dict[int, Device]:
    if "TARGET_INFO_GPU" not in export.tables:
        return {}
    wanted = ("id", "smCount", "threadsPerWarp", "maxShmemPerBlockOptin", "maxRegistersPerSm", "maxShmemPerSm")
    columns = export.columns("TARGET_INFO_GPU", (*wanted, "maxWarpsPerSm"))
    known = {row[1] for row in export.base.execute("PRAGMA table_info(TARGET_INFO_GPU)")}
    names = export.base.execute("SELECT name FROM TARGET_INFO_GPU").fetchall() if "name" in known else []
    result = {}
    for row, ordinal in enumerate(columns["id"].tolist()):
        warp = max(int(columns["threadsPerWarp"][row]), 1)
        warps = int(columns["maxWarpsPerSm"][row])
        result[ordinal] = Device(
            ordinal=ordinal,
            name=str(names[row][0]) if names else "",
            num_sms=int(columns["smCount"][row]),
            registers_per_sm=int(columns["maxRegistersPerSm"][row]),
            shared_bytes_per_sm=int(columns["maxShmemPerSm"][row]),
            threads_per_sm=warps * warp if warps > 0 else -1,
            warp_size=warp,
        )
    return result
