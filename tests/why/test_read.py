"""Reading: every form of a file gives the same tables, and every damage its error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from build import Builder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchweave.errors import UnreadableInputError
from torchweave.trace.kineto import read_kineto
from torchweave.trace.read import read
from torchweave.trace.timeline import COPY, DEVICE_TO_HOST, HOST_TO_DEVICE, MEMSET

TRACES = Path(__file__).parents[1] / "traces"
SMALL = TRACES / "causes" / "download_each_step.plain.json.gz"


def columns(path: Path, **options) -> list[list[int]]:
    timeline = read_kineto(path, **options) if options else read(path)
    work = timeline.work
    names = [timeline.names[code] for code in work.name]
    return [work.begin.tolist(), work.end.tolist(), work.stream.tolist(), work.call.tolist(), names]


def lengths(path: Path) -> list[int]:
    work = read(path).work
    return (work.end - work.begin).tolist()


def test_plain_gzip_and_bare_list_are_one(tmp_path):
    data = gzip.decompress(SMALL.read_bytes())
    (tmp_path / "plain.json").write_bytes(data)
    (tmp_path / "two.json.gz").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    (tmp_path / "list.json").write_text(json.dumps(json.loads(data)["traceEvents"]))
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + data)
    expected = columns(SMALL)
    for name in ("plain.json", "two.json.gz", "list.json", "bom.json"):
        assert columns(tmp_path / name) == expected


@pytest.mark.parametrize("piece_bytes", [500, 4_000, 60_000])
def test_pieces_do_not_change_what_is_read(piece_bytes):
    assert columns(SMALL, piece_bytes=piece_bytes) == columns(SMALL)


def test_a_list_in_pieces(tmp_path):
    path = tmp_path / "list.json"
    path.write_text(json.dumps(json.loads(gzip.decompress(SMALL.read_bytes()))["traceEvents"]))
    assert columns(path, piece_bytes=2_000) == columns(SMALL)


def test_old_categories_and_rocm_names(tmp_path):
    build = Builder()
    build.op("aten::mm", 0, 50)
    build.row("Runtime", "cudaLaunchKernel", 5, 5, correlation=1)
    build.row("Kernel", "gemm", 20, 100, 7, 0, device=0, stream=7, correlation=1)
    build.row("Memcpy", "Memcpy HtoD (Pageable -> Device)", 130, 10, 7, 0, device=0, stream=7, correlation=2)
    build.row("gpu_memcpy", "CopyDeviceToHost", 150, 10, 7, 0, device=0, stream=7, correlation=3)
    build.row("Memset", "Memset (Device)", 170, 10, 7, 0)
    work = read(build.write(tmp_path / "old.json")).work
    assert work.kind.tolist() == [0, COPY, COPY, MEMSET]
    assert work.direction.tolist() == [-1, HOST_TO_DEVICE, DEVICE_TO_HOST, -1]
    assert work.pageable.tolist() == [False, True, False, False]
    assert work.call.tolist() == [0, -1, -1, -1]
    # the last row has no arguments: its place is its process and thread
    assert work.stream.tolist()[-1] == 7


def test_an_operator_is_found_by_its_number_though_the_thread_is_another(tmp_path):
    build = Builder()
    build.op("autograd::engine::evaluate_function: MulBackward0", 0, 100, tid=50, **{"External id": 9})
    build.op("aten::mul", 10, 40, tid=50, **{"External id": 10})
    number = build.call("cudaLaunchKernel", 20, 5, tid=51, **{"External id": 10})
    build.row("kernel", "mul", 60, 10, 7, 0, device=0, stream=7, correlation=number, **{"External id": 10})
    timeline = read(build.write(tmp_path / "alias.json"))
    assert timeline.names[timeline.ops.name[timeline.work.op[0]]] == "aten::mul"
    assert timeline.work.backward.tolist() == [True]
    assert timeline.calls.engine.tolist() == [True]


def test_times_of_a_large_clock_keep_their_nanoseconds(tmp_path):
    build = Builder()
    build.kernel(7, 5_193_968_918_657.482, 5_193_968_918_700.125, 10.001)
    assert lengths(build.write(tmp_path / "clock.json")) == [10_001]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "0 bytes"),
        (b"  \n ", "no bytes but spaces"),
        (b"{}", "traceEvents"),
        (b"[]", "traceEvents"),
        (b'{"traceEvents": []}', "traceEvents"),
        (b'{"traceEvents": 5}', "without one"),
        (b'{"a": [1, 2]}', "traceEvents"),
        (b"42", "int without one"),
        (b'"text"', "str without one"),
        (b"hello", "byte 0"),
        (b'{"traceEvents": [{"ph" "X"}]}', "byte 23"),
        (b"PK\x03\x04 zip", "zip"),
        (b"\x80\x04\x95", "pickle"),
        (b"<html></html>", "HTML"),
        (b"\x1f\x8bnot gzip at all", "gzip"),
        (b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1,"pid":1,"tid":1}]}', "no GPU work"),
        (b"SQLite format 3\x00 and no more", "intact export"),
    ],
)
def test_wrong_files_say_what_was_found_and_where(content, what, tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableInputError, match=what) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_cut_at_its_end_is_read_up_to_there(packed, tmp_path):
    data = gzip.decompress(SMALL.read_bytes())
    data = data[: int(len(data) * 0.8)]
    path = tmp_path / "cut.json"
    path.write_bytes(gzip.compress(data)[:-20] if packed else data)
    timeline = read(path)
    assert 0 < len(timeline.work) <= len(read(SMALL).work)
    assert any("ends early" in warning or "end early" in warning for warning in timeline.warnings)


def test_numbers_and_text_that_are_no_json_are_read_with_a_warning(tmp_path):
    build = Builder()
    build.kernel(7, 0, 10, 10)
    build.kernel(7, 20, 30, 10, name="bad \udcff name")
    text = json.dumps(build.trace()).replace('"ts": 30', '"ts": NaN')
    path = tmp_path / "odd.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass").replace(b"narrow", b"nar\xffrow"))
    timeline = read(path)
    assert len(timeline.work) == 1
    assert len(timeline.warnings) == 2


@given(
    spans=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), min_size=1, max_size=30),
    piece_bytes=st.integers(100, 3_000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_kernels_come_back_as_they_are(spans, piece_bytes, tmp_path):
    build = Builder()
    for begin, length in spans:
        build.kernel(7, begin, begin + 1000, length)
    work = read_kineto(build.write(tmp_path / "any.json"), piece_bytes=piece_bytes).work
    found = sorted(zip((work.begin - work.begin.min()).tolist(), (work.end - work.begin).tolist(), strict=True))
    first = min(begin for begin, _ in spans)
    assert found == sorted(((begin - first) * 1000, length * 1000) for begin, length in spans)
    assert np.all(work.call >= 0)
