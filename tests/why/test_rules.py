"""One hand-made trace for each rule of blame that the recorded traces do not cover, or cover only together."""

from __future__ import annotations

from pathlib import Path

import pytest
from build import Builder

from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.trace.read import read


@pytest.fixture
def build() -> Builder:
    return Builder()


def diagnosed(build: Builder, path: Path, **options) -> Diagnosis:
    return diagnose(read(build.write(path / "trace.json")), **options)


def first(found: Diagnosis) -> str:
    assert found.causes, found.sentence
    assert sum(cause.lost_ms for cause in found.causes) == pytest.approx(found.numbers.lost_ms, rel=0.01)
    assert sum(cause.idle_ms for cause in found.causes) == pytest.approx(found.numbers.idle_ms, rel=0.01, abs=1e-6)
    return found.causes[0].cause


def alternate(build: Builder, *, times: int = 8, length: float = 1000, pause: float = 2, **second) -> None:
    """Two streams by turns, all launched early, without waits."""
    at = 1000.0
    for turn in range(times):
        stream = (7, 13)[turn % 2]
        build.kernel(stream, 10 * turn, at, length, **(second if turn % 2 else {}))
        at += length + pause


def test_the_default_stream_orders(build, tmp_path):
    alternate(build)
    assert first(diagnosed(build, tmp_path)) == "legacy_default_stream"


def test_no_launch_calls_no_finding(build, tmp_path):
    alternate(build)
    build.events = [event for event in build.events if event["cat"] == "kernel"]
    found = diagnosed(build, tmp_path)
    assert [cause.cause for cause in found.causes] == ["unknown"]
    assert any("launch calls of 8 of 8" in text for text in found.not_known)


def test_a_full_chip(build, tmp_path):
    shape = {"grid": [264, 1, 1], "block": [1024, 1, 1], "registers per thread": 32}
    at = 0.0
    for turn in range(6):
        build.kernel((13, 17)[turn % 2], 5 * turn, 100 + at, 1000, **shape)
        at += 900
    assert first(diagnosed(build, tmp_path)) == "sm_full"


def test_room_for_one_more_block_is_no_full_chip(build, tmp_path):
    # one block of 1024 threads a multiprocessor: half of it is free
    shape = {"grid": [132, 1, 1], "block": [1024, 1, 1], "registers per thread": 32}
    at = 0.0
    for turn in range(6):
        build.kernel((13, 17)[turn % 2], 5 * turn, 100 + at, 1000, **shape)
        at += 900
    assert first(diagnosed(build, tmp_path)) == "unknown"


@pytest.mark.parametrize(("other", "cause"), [("HtoD", "copy_engine"), ("DtoH", "unknown")])
def test_copies_share_an_engine_only_in_one_direction(build, tmp_path, other, cause):
    for turn in range(6):
        name = "HtoD" if turn % 2 == 0 else other
        build.copy((13, 17)[turn % 2], 5 * turn, 100 + 1000 * turn, 999, f"Memcpy {name} (Pinned -> Device)")
    assert first(diagnosed(build, tmp_path)) == cause


def test_one_hardware_queue(build, tmp_path):
    for turn in range(4):
        build.kernel(13, 10 * turn, 1000 + 1000 * turn, 999)
    build.kernel(17, 50, 4001, 1000)
    for turn in range(4):
        build.kernel(17, 60 + 10 * turn, 5002 + 1000 * turn, 999)
    assert first(diagnosed(build, tmp_path)) == "max_connections"


def test_a_long_gap_of_the_host_is_host_busy_only_where_the_queue_ran_dry(build, tmp_path):
    for turn in range(5):
        at = 10_000.0 * turn
        build.op("aten::cumsum", at, 20)
        build.kernel(13, at + 5, at + 15, 100)
        build.op("aten::cumsum", at + 5000, 20)
        build.kernel(17, at + 5005, at + 5015, 100)
    found = diagnosed(build, tmp_path)
    assert first(found) == "host_busy"
    assert found.causes[0].idle_ms == pytest.approx(found.numbers.idle_ms, rel=0.05)


def test_a_long_gap_under_full_queues_is_harmless(build, tmp_path):
    for turn in range(4):
        build.op("aten::cumsum", 5000 * turn, 20)
        build.kernel(13, 5000 * turn + 5, 100 + 20_000 * turn, 19_900)
        build.kernel(17, 5000 * turn + 12, 110 + 20_000 * turn, 19_900)
    found = diagnosed(build, tmp_path)
    assert found.verdict == "overlapped"
    assert found.causes == ()


def test_two_threads_that_alternate(build, tmp_path):
    for turn in range(20):
        at = 4000.0 * turn
        build.op("aten::cumsum", at, 30, tid=1)
        build.kernel(13, at + 10, at + 30, 200, tid=1)
        build.op("aten::cumsum", at + 2000, 30, tid=2)
        build.kernel(17, at + 2010, at + 2030, 200, tid=2)
    found = diagnosed(build, tmp_path)
    causes = {cause.cause: cause for cause in found.causes}
    assert causes["gil"].certainty == "likely"


def test_a_long_collective_before_the_awaited_one(build, tmp_path):
    def collective(launch: float, begin: float, length: float, size: int) -> None:
        build.kernel(
            20, launch, begin, length, name="ncclDevKernel_AllReduce", **{
                "Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": size,
                "Out msg nelems": size, "dtype": "Float",
            },
        )  # fmt: skip

    for step in range(4):
        at, zero = 1000.0 * step, 10_000.0 * step
        build.kernel(7, at, zero + 100, 2000, name="gemm")
        collective(at + 10, zero + 2110, 5000, 25_000_000)
        collective(at + 20, zero + 7112, 500, 2_500_000)
        build.wait(7, at + 30)
        build.kernel(7, at + 40, zero + 7616, 2000, name="gemm")
    found = diagnosed(build, tmp_path)
    causes = {cause.cause: cause for cause in found.causes}
    assert causes["comm_order"].lost_ms > 0.3 * found.numbers.lost_ms


def test_an_event_that_the_recording_names_is_shown(build, tmp_path):
    at = 1000.0
    for turn in range(8):
        stream = (13, 17)[turn % 2]
        build.wait(stream, 20 * turn, record=5)
        build.kernel(stream, 20 * turn + 5, at, 999)
        at += 1003
    found = diagnosed(build, tmp_path)
    assert first(found) == "wide_dependency"
    assert found.causes[0].certainty == "shown"


def test_a_graph_without_a_fork(build, tmp_path):
    for replay in range(3):
        number = build.call("cudaGraphLaunch", 10_000 * replay, 50)
        for kernel in range(6):
            name = "ncclDevKernel_AllGather" if kernel % 2 else "gemm"
            begin = 10_000 * replay + 100 + 1000 * kernel
            build.row("kernel", name, begin, 998, 7, 0, device=0, stream=7, correlation=number)
    assert first(diagnosed(build, tmp_path)) == "graph_one_branch"


def test_gradients_on_a_stray_stream(build, tmp_path):
    engine = "autograd::engine::evaluate_function: "
    for step in range(4):
        at = 2000.0 * step
        build.op(f"{engine}MmBackward0", at, 40, tid=2, **{"External id": 10 * step + 1, "Sequence number": 5})
        build.kernel(7, at + 10, at + 50, 800, tid=2, **{"External id": 10 * step + 1})
        node = f"{engine}torch::autograd::AccumulateGrad"
        build.op(node, at + 60, 40, tid=2, **{"External id": 10 * step + 2})
        build.wait(31, at + 65, tid=2)
        build.kernel(31, at + 70, at + 855, 800, name="add_", tid=2, **{"External id": 10 * step + 2})
    found = diagnosed(build, tmp_path, between=("stream:7", "stream:31"))
    assert "accumulate_grad_stream" in [cause.cause for cause in found.causes]


def test_kernels_that_stretch_are_a_remark(build, tmp_path):
    for turn in range(4):
        build.kernel(13, 5 * turn, 100 + 1000 * turn, 500, name="gemm")
        build.kernel(17, 1000 + 5 * turn, 10_000 + 2000 * turn, 900, name="gemm2")
        build.kernel(13, 2000 + 5 * turn, 10_000 + 2000 * turn, 900, name="gemm")
    found = diagnosed(build, tmp_path)
    assert any("gemm took 1.80 times as long" in remark for remark in found.remarks)


def test_asked_sides_on_one_stream_say_so(build, tmp_path):
    for turn in range(6):
        at = 100.0 * turn
        build.row("user_annotation", ("one", "two")[turn % 2], at, 50)
        build.kernel(7, at + 10, 1000 + 1000 * turn, 998)
    found = diagnosed(build, tmp_path, between=("range:one", "range:two"))
    assert first(found) == "same_stream"
    assert found.causes[0].lost_ms == pytest.approx(found.numbers.possible_ms)


@pytest.mark.parametrize(("call", "sync"), [("cudaMemcpyAsync", True), ("hipMemcpyWithStream", False)])
def test_a_number_read_through_pageable_memory_is_the_operators_doing(build, tmp_path, call, sync):
    for step in range(6):
        at, stream = 3000.0 * step, (13, 17)[step % 2]
        build.op("aten::cumsum", at, 20)
        build.kernel(stream, at + 5, at + 15, 2000)
        build.op("aten::item", at + 30, 2050)
        build.op("aten::_local_scalar_dense", at + 31, 2040)
        number = build.call(call, at + 35, 1990)
        name = "Memcpy DtoH (Device -> Pageable)"
        build.row("gpu_memcpy", name, at + 2017, 2, stream, 0, device=0, stream=stream, correlation=number, bytes=4)
        if sync:
            build.call("cudaStreamSynchronize", at + 2030, 5)
    found = diagnosed(build, tmp_path)
    assert first(found) == "host_sync"
    assert found.causes[0].where.op == "aten::item"


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_trace_that_begins_in_the_middle_of_a_step_has_no_two_sides(build, tmp_path, optimizer):
    engine = "autograd::engine::evaluate_function: "
    build.op(f"{engine}MmBackward0", 0, 40, tid=2, **{"External id": 1, "Sequence number": 90})
    build.kernel(7, 10, 50, 900, tid=2, **{"External id": 1})
    if optimizer:
        build.row("user_annotation", "Optimizer.step#SGD.step", 100, 60)
        build.op("aten::_foreach_add_", 110, 40, **{"External id": 2})
        build.kernel(7, 120, 955, 100, **{"External id": 2})
    build.op("aten::mm", 200, 40, **{"External id": 3, "Sequence number": 100})
    build.kernel(7, 210, 1060, 900, **{"External id": 3})
    build.op(f"{engine}MmBackward0", 300, 40, tid=2, **{"External id": 4, "Sequence number": 100})
    build.kernel(7, 310, 1965, 900, tid=2, **{"External id": 4})
    found = diagnosed(build, tmp_path)
    assert found.verdict == ("nothing_to_overlap" if optimizer else "serial")


def test_long_kernels_launched_quickly_are_not_launch_bound(build, tmp_path):
    """Catches the first operation of a late stream charged to slow launching, with evidence that says the contrary."""
    for turn in range(6):
        build.kernel(13, 10 * turn, 20 + 1000 * turn, 999)
    for turn in range(6):
        build.kernel(17, 6010 + 10 * turn, 6030 + 1000 * turn, 999)
    found = diagnosed(build, tmp_path, between=("stream:13", "stream:17"))
    assert "launch_bound" not in [cause.cause for cause in found.causes]


def test_the_start_after_a_late_launch_is_the_launchs(build, tmp_path):
    """Catches the device's latency of each tiny kernel standing first, as unknown."""
    for turn in range(200):
        build.kernel((13, 17)[turn % 2], 10 * turn, 10 * turn + 7, 3, launch_us=2.0)
    found = diagnosed(build, tmp_path)
    assert first(found) == "launch_bound"
    assert "Operations of 3.0 us at the median, launched 10.0 us apart" in found.causes[0].evidence


@pytest.mark.parametrize("length", [0, 1])
def test_a_memset_before_a_kernel_waited_for_what_the_kernel_waited_for(build, tmp_path, length):
    """Catches an operation that rounds to no length taken for the reason of the one behind it."""
    begin = 1000
    for turn in range(8):
        stream = (13, 17)[turn % 2]
        build.wait(stream, 30 * turn)
        number = build.call("cudaMemsetAsync", 30 * turn + 5, 3)
        build.row("gpu_memset", "Memset", begin, length, stream, 0, device=0, stream=stream, correlation=number)
        build.kernel(stream, 30 * turn + 10, begin + 2, 1000)
        begin += 1010
    found = diagnosed(build, tmp_path)
    assert first(found) == "wide_dependency"
    assert found.causes[0].lost_ms == pytest.approx(found.numbers.lost_ms, rel=0.05)


def test_rows_without_length_and_launch_hold_nothing_up(build, tmp_path):
    begin = 1000
    for turn in range(8):
        stream = (13, 17)[turn % 2]
        build.wait(stream, 20 * turn)
        build.kernel(stream, 20 * turn + 5, begin, 1000)
        build.row("kernel", "odd", begin - 1, 0, stream, 0, device=0, stream=stream, correlation=9_000_000 + turn)
        begin += 1003
    found = diagnosed(build, tmp_path)
    assert first(found) == "wide_dependency"
    assert found.causes[0].lost_ms == pytest.approx(found.numbers.lost_ms, rel=0.05)


@pytest.mark.parametrize("words", [("range:outer", "stream:17"), ("stream:17", "range:outer")])
def test_a_side_within_the_other_leaves_the_rest(build, tmp_path, words):
    for turn in range(6):
        build.kernel((13, 17)[turn % 2], 10 * turn, 100 + 1000 * turn, 999)
    build.row("user_annotation", "outer", -5, 1000)
    found = diagnosed(build, tmp_path, between=words)
    assert found.numbers.first_ms == found.numbers.second_ms == pytest.approx(2.997)


def test_without_operators_what_a_synchronization_was_for_is_only_likely(build, tmp_path):
    for step in range(6):
        at = 3000.0 * step
        build.kernel((13, 17)[step % 2], at + 5, at + 15, 1900)
        build.copy((13, 17)[step % 2], at + 20, at + 1917, 50, "Memcpy DtoH (Device -> Pinned)")
        build.call("cudaStreamSynchronize", at + 30, 1945)
    found = diagnosed(build, tmp_path)
    assert first(found) == "blocking_copy"
    assert found.causes[0].certainty == "likely"
