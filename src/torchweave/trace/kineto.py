"""Kineto's Chrome JSON to a `Timeline`: read in pieces, joined, sorted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from torchweave.errors import UnreadableInputError
from torchweave.trace import link
from torchweave.trace.columns import Columns
from torchweave.trace.events import ANNOTATION, CALL, FRAME, OP, OVERHEAD, WAIT, WORK, Document
from torchweave.trace.parse import NoTraceError, is_bare_list, parse
from torchweave.trace.pieces import PIECE_BYTES, pieces
from torchweave.trace.timeline import (
    COPY,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
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

ENGINE = "autograd::engine::evaluate_function"

# Source: HIP, `hipExtModuleLaunchKernel`: globalWorkSizeX counts threads, where others count blocks.
_GRID_IN_THREADS = re.compile(r"^hip(?:Ext|Hcc)ModuleLaunchKernel")


def read_kineto(path: Path, *, piece_bytes: int = PIECE_BYTES) -> Timeline:
    """Read a Chrome trace, plain or gzip.

    Args:
        path: The file.
        piece_bytes: How much of it is in memory at a time.

    Returns:
        The trace's tables, joined.

    Raises:
        UnreadableInputError: It is damaged, empty, or no trace.
    """
    columns, document, warnings = Columns(), Document(), []
    bare_list = False
    for piece in pieces(path, piece_bytes):
        if piece.first:
            if not piece.text.strip(b"\0 \t\r\n"):
                raise UnreadableInputError("A trace must not be empty", given=f"{path}: no bytes but spaces")
            bare_list = is_bare_list(piece.text)
        parsed = parse(piece, str(path), bare_list=bare_list)
        columns.add(parsed.events)
        document = _merge(document, parsed.document)
        warnings += [warning for warning in parsed.warnings if warning not in warnings]
        if piece.cut:
            warnings.append(piece.cut)
    if columns.num_phases == 0:
        raise NoTraceError(
            "A trace has to hold events",
            given=f"{path}: JSON with {columns.num_rows} rows, none of them an event of `traceEvents`",
            remedy="give the file that `export_chrome_trace` wrote",
        )
    if columns.num_dropped:
        warnings.append(
            f"{columns.num_dropped} of {columns.num_events} rows have times that are no numbers, negative or "
            "far away from all others, and were left out"
        )
    return _timeline(path, columns, document, warnings)


def _merge(known: Document, new: Document | None) -> Document:
    """Add the metadata of one more piece."""
    if new is None:
        return known
    for name in Document.__struct_fields__:
        if name != "events" and not getattr(known, name):
            setattr(known, name, getattr(new, name))
    return known


def _timeline(path: Path, columns: Columns, document: Document, warnings: list[str]) -> Timeline:
    names = tuple(str(name) for name in columns.names.values())
    ops = _ops(columns, names)
    calls = _calls(columns, ops)
    work = _work(columns, calls, ops, names)
    distributed = document.distributed if isinstance(document.distributed, dict) else {}
    return Timeline(
        file=str(path),
        format="kineto",
        rank=_int_or_none(distributed.get("rank")),
        world_size=_int_or_none(distributed.get("world_size")),
        origin_ns=round((columns.base_us or 0.0) * 1e3) + (_int_or_none(document.base_ns) or 0),
        names=names,
        threads=tuple(str(thread) for _, thread in columns.threads.values()),
        work=work,
        calls=calls,
        ops=ops,
        frames=_spans(columns, FRAME),
        annotations=_spans(columns, ANNOTATION),
        overhead=_spans(columns, OVERHEAD),
        waits=_waits(columns, names),
        devices=_devices(document.device_properties),
        metadata=_texts(document),
        warnings=tuple(warnings),
    )


def _int_or_none(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _texts(document: Document) -> dict[str, str]:
    names = ("schema", "with_stack", "runtime_version", "hip_version", "launch_blocking", "max_connections")
    values = {name: getattr(document, name) for name in (*names, "module_loading")}
    return {name: str(value) for name, value in values.items() if value is not None}


def _devices(properties: Any) -> dict[int, Device]:
    """Return the devices that the head of a trace describes."""
    rows = [row for row in properties if isinstance(row, dict)] if isinstance(properties, list) else []

    def number(row: dict[str, Any], *keys: str) -> int:
        return next((value for key in keys if (value := _int_or_none(row.get(key))) is not None), -1)

    return {
        number(row, "id"): Device(
            ordinal=number(row, "id"),
            name=str(row.get("name", "")),
            num_sms=number(row, "numSms"),
            registers_per_sm=number(row, "regsPerMultiprocessor", "regsPerBlock"),
            shared_bytes_per_sm=number(row, "sharedMemPerMultiprocessor", "maxSharedMemoryPerMultiProcessor"),
            threads_per_sm=number(row, "maxThreadsPerMultiprocessor"),
            warp_size=max(number(row, "warpSize"), 1),
        )
        for row in rows
    }


def _ops(columns: Columns, names: tuple[str, ...]) -> Ops:
    begin, end = columns.column(OP, "begin"), columns.column(OP, "end")
    thread = columns.column(OP, "thread")
    order = np.lexsort((-end, begin, thread))
    begin, end, thread = begin[order], end[order], thread[order]
    name = columns.column(OP, "name")[order]
    parent = link.nest(begin, end, thread)
    engine = np.array([text.startswith(ENGINE) for text in names] or [False])
    return Ops(
        begin=begin,
        end=end,
        thread=thread,
        name=name,
        external=columns.column(OP, "external")[order],
        sequence=columns.column(OP, "sequence")[order],
        parent=parent,
        backward=link.under(engine[name], parent),
    )


def _calls(columns: Columns, ops: Ops) -> Calls:
    order = np.argsort(columns.column(CALL, "begin"), kind="stable")
    begin, thread = columns.column(CALL, "begin")[order], columns.column(CALL, "thread")[order]
    correlation = columns.column(CALL, "correlation")[order]
    external = columns.column(CALL, "external")[order]
    table = (ops.begin, ops.end, ops.thread, ops.external, ops.parent)
    by_number = link.operators_of(begin, np.full(len(begin), -2), external, table)
    # an engine thread's operators and calls can carry different thread numbers: learn which are the same
    alias = _aliases(thread, ops.thread[np.maximum(by_number, 0)] if len(ops) else thread, by_number >= 0)
    thread = alias[thread] if len(thread) else thread
    op = link.operators_of(begin, thread, external, table)
    top = ops.parent < 0
    engine = np.unique(ops.thread[top & ops.backward])
    engine = engine[[_mostly(ops.backward[top & (ops.thread == code)]) for code in engine]]
    return Calls(
        begin=begin,
        end=columns.column(CALL, "end")[order],
        thread=thread,
        name=columns.column(CALL, "name")[order],
        correlation=correlation,
        op=op,
        engine=np.isin(thread, engine),
    )


def _mostly(flags: Flags) -> bool:
    return bool(flags.mean() > 0.5)


def _aliases(thread: Ints, op_thread: Ints, joined: Flags) -> Ints:
    """Return, for each thread code, the thread on which its operators are recorded."""
    alias = np.arange(int(max(thread.max(initial=-1), op_thread.max(initial=-1))) + 1)
    for code in np.unique(thread[joined]):
        found = op_thread[joined & (thread == code)]
        values, counts = np.unique(found, return_counts=True)
        alias[code] = values[np.argmax(counts)]
    return alias


def _work(columns: Columns, calls: Calls, ops: Ops, names: tuple[str, ...]) -> Work:
    order = np.lexsort((columns.column(WORK, "end"), columns.column(WORK, "begin")))

    def column(name: str) -> Ints:
        return np.asarray(columns.column(WORK, name)[order], dtype=np.int64)

    direction, pageable = copies_by_name(names)
    name, kind = column("name"), column("kind")
    call = link.rows_of(column("correlation"), calls.correlation)
    op, backward = np.full(len(call), -1, dtype=np.int64), np.zeros(len(call), dtype=np.bool_)
    joined = call >= 0
    op[joined], backward[joined] = calls.op[call[joined]], calls.engine[call[joined]]
    external = column("external")
    loose = ~joined & (external != column("correlation"))
    op[loose] = link.rows_of(external[loose], ops.external)
    backward[op >= 0] = ops.backward[op[op >= 0]]
    is_copy = kind == COPY
    blocks, threads = column("blocks"), column("threads")
    # these calls of HIP take their grid in threads
    counted = np.array([_GRID_IN_THREADS.match(text) is not None for text in names] or [False])[calls.name]
    in_threads = joined & (blocks > 0) & (threads > 0)
    in_threads[in_threads] = counted[call[in_threads]]
    blocks = np.where(in_threads, -(-blocks // np.maximum(threads, 1)), blocks)
    return Work(
        begin=column("begin"),
        end=column("end"),
        device=column("device"),
        stream=column("stream"),
        kind=kind,
        name=name,
        direction=np.where(is_copy, direction[name], -1) if len(name) else name,
        pageable=is_copy & pageable[name] if len(name) else is_copy,
        num_bytes=column("num_bytes"),
        correlation=column("correlation"),
        call=call,
        op=op,
        backward=backward,
        blocks=blocks,
        threads=threads,
        registers=column("registers"),
        shared_bytes=column("shared_bytes"),
        collective=column("collective"),
        group=column("group"),
        elements=column("elements"),
        element_bytes=column("element_bytes"),
    )


def copies_by_name(names: tuple[str, ...]) -> tuple[Ints, Flags]:
    """Return, for each name as that of a copy, its direction, and whether its host side is pageable."""
    direction = np.full(len(names), ON_DEVICE, dtype=np.int64)
    pageable = np.zeros(len(names), dtype=np.bool_)
    for code, name in enumerate(names):
        if "HtoD" in name or "HostToDevice" in name or "Host-to-Device" in name:
            direction[code] = HOST_TO_DEVICE
        elif "DtoH" in name or "DeviceToHost" in name or "Device-to-Host" in name:
            direction[code] = DEVICE_TO_HOST
        pageable[code] = "Pageable" in name
    return direction, pageable


def _spans(columns: Columns, kind: int) -> Spans:
    order = np.argsort(columns.column(kind, "begin"), kind="stable")
    return Spans(**{name: columns.column(kind, name)[order] for name in ("begin", "end", "thread", "name")})


def _waits(columns: Columns, names: tuple[str, ...]) -> Waits:
    """Return the waits of streams; the other rows of their category are the host's."""
    wanted = np.array(["Stream Wait" in name for name in names] or [False])
    name = columns.column(WAIT, "name")
    keep = np.flatnonzero(wanted[name])
    keep = keep[np.argsort(columns.column(WAIT, "begin")[keep], kind="stable")]
    fields = ("begin", "stream", "correlation", "record_correlation", "on_stream")
    return Waits(**{field: columns.column(WAIT, field)[keep] for field in fields})
