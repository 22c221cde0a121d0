"""Exports of Nsight Systems, made by hand in the schemas of 2022 and 2025: no real ones could be found."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from torchweave.cli.main import main
from torchweave.diagnose.verdicts import diagnose
from torchweave.errors import UnreadableInputError
from torchweave.trace.read import read

_KERNEL = "start, end, deviceId, streamId, correlationId, demangledName, shortName"
_SHAPE = "gridX, gridY, gridZ, blockX, blockY, blockZ"
_COPY = "start, end, deviceId, streamId, correlationId, bytes, copyKind, srcKind, dstKind"
_SYNC = "start, end, syncType, streamId, eventId, eventSyncId, correlationId"
_PREFIX = "CUPTI_ACTIVITY_KIND_"
_MS = 1_000_000


def export(path: Path, *, new: bool) -> Path:
    """Two streams: the second's kernels wait for an event of the first."""
    base = sqlite3.connect(path)
    extra = ", registersPerThread, staticSharedMemory, dynamicSharedMemory" if new else ""
    names = {
        1: "narrow_kernel",
        2: "cudaLaunchKernel_v7000",
        3: "cudaStreamWaitEvent_v3020",
        4: "cudaMemcpyAsync_v3020",
    }
    names |= {5: "cudaDeviceSynchronize_v3020", 6: "step"}
    base.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    base.executemany("INSERT INTO StringIds VALUES (?, ?)", names.items())
    base.execute(f"CREATE TABLE {_PREFIX}KERNEL ({_KERNEL}, {_SHAPE}{extra})")
    base.execute(f"CREATE TABLE {_PREFIX}RUNTIME (start, end, globalTid, correlationId, nameId, returnValue)")
    base.execute(f"CREATE TABLE {_PREFIX}MEMCPY ({_COPY})")
    base.execute("CREATE TABLE NVTX_EVENTS (start, end, eventType, text, globalTid" + (", textId)" if new else ")"))
    if new:
        base.execute(f"CREATE TABLE {_PREFIX}SYNCHRONIZATION ({_SYNC})")
        base.execute(f"CREATE TABLE {_PREFIX}CUDA_EVENT (streamId, correlationId, eventId, eventSyncId)")
    thread = (7 << 24) + 42
    origin = 10**15
    number = 0
    for step in range(4):
        for stream in (13, 14):
            number += 2
            if stream == 14 or step:
                wait = (origin + number * 1000, origin + number * 1000 + 500, thread, number, 3, 0)
                base.execute(f"INSERT INTO {_PREFIX}RUNTIME VALUES (?, ?, ?, ?, ?, ?)", wait)
                if new:
                    base.execute(
                        f"INSERT INTO {_PREFIX}SYNCHRONIZATION VALUES (?, ?, 2, ?, 1, ?, ?)",
                        (origin, origin, stream, number, number),
                    )
                    base.execute(
                        f"INSERT INTO {_PREFIX}CUDA_EVENT VALUES (?, ?, 1, ?)",
                        (27 - stream, number + 1000, number),
                    )
            launch = (origin + number * 1000 + 600, origin + number * 1000 + 900, thread, number + 1, 2, 0)
            base.execute(f"INSERT INTO {_PREFIX}RUNTIME VALUES (?, ?, ?, ?, ?, ?)", launch)
            begin = origin + _MS + (number // 2 - 1) * 2 * _MS
            row = [begin, begin + 2 * _MS - 2000, 0, stream, number + 1, 1, 1, 16, 1, 1, 256, 1, 1]
            row += [32, 0, 0] if new else []
            base.execute(f"INSERT INTO {_PREFIX}KERNEL VALUES ({', '.join('?' * len(row))})", row)
    note = (origin, origin + 10 * _MS, 59, None if new else "step", thread) + ((6,) if new else ())
    base.execute(f"INSERT INTO NVTX_EVENTS VALUES ({', '.join('?' * len(note))})", note)
    copy = (origin + 20 * _MS, origin + 20 * _MS + 5000, 0, 13, 999, 4096, 1, 0, 2)
    base.execute(f"INSERT INTO {_PREFIX}MEMCPY VALUES ({', '.join('?' * len(copy))})", copy)
    base.commit()
    base.close()
    return path


@pytest.mark.parametrize("new", [False, True])
def test_an_export_is_read_and_diagnosed(new, tmp_path):
    timeline = read(export(tmp_path / "report.sqlite", new=new))
    assert timeline.format == "nsys"
    assert len(timeline.work) == 9
    assert timeline.work.pageable.tolist()[-1]
    assert timeline.names[timeline.calls.name[0]] == "cudaLaunchKernel"
    assert timeline.names[timeline.annotations.name[0]] == "step"
    found = diagnose(timeline)
    assert found.verdict == "serial"
    assert found.causes[0].cause == "wide_dependency"
    # only where the export names the event's record is it shown
    assert found.causes[0].certainty == ("shown" if new else "likely")


def test_other_databases_are_unreadable(tmp_path):
    path = tmp_path / "other.sqlite"
    base = sqlite3.connect(path)
    base.execute("CREATE TABLE people (name)")
    base.commit()
    base.close()
    with pytest.raises(UnreadableInputError, match="people"):
        read(path)
    assert main(["why", str(path)]) == 3


def test_a_cut_export_is_unreadable(tmp_path):
    path = export(tmp_path / "cut.sqlite", new=True)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UnreadableInputError, match=r"cut\.sqlite"):
        read(path)


@pytest.mark.parametrize(("number", "pageable"), [(0, True), (1, False), (2, False)])
@pytest.mark.parametrize("enumerated", [False, True])
def test_memory_kinds_are_the_exports_own(tmp_path, number, pageable, enumerated):
    """Catches CUPTI's numbers, which begin at 1, read into an export, whose numbers begin at 0."""
    path = export(tmp_path / "x.sqlite", new=True)
    base = sqlite3.connect(path)
    shift = 10 if enumerated else 0
    if enumerated:
        base.execute("CREATE TABLE ENUM_CUDA_MEM_KIND (id, name, label)")
        rows = [(10, "PAGEABLE", "Pageable"), (11, "PINNED", "Pinned"), (12, "DEVICE", "Device")]
        base.executemany("INSERT INTO ENUM_CUDA_MEM_KIND VALUES (?, ?, ?)", rows)
    base.execute(f"UPDATE {_PREFIX}MEMCPY SET srcKind = ?, dstKind = ?", (number + shift, 2 + shift))
    base.commit()
    base.close()
    work = read(path).work
    assert work.pageable[work.kind == 1].tolist() == [pageable]
