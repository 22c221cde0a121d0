"""What benchmarks read from traces of two ranks: how much of the transfers between them was behind computation."""

import gzip
import json

import pytest
from measuring.traces import keep_small
from measuring.transfers import device_work, transfers_of

SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def trace(path, events):
    """Write a trace of (name, begin, end) in us, each a kernel."""
    rows = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "pid": 0, "tid": 7}
        for name, begin, end in events
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": rows, "baseTimeNanoseconds": 1000}).encode()))
    return path


@pytest.fixture
def two_ranks(tmp_path):
    """One transfer: rank 1 waits for it from 10 on, rank 0 sends from 40 on; another at the end, behind nothing."""
    one = trace(tmp_path / "0.gz", [("gemm", 0, 40), (SEND, 40, 50), ("gemm", 40, 80), (SEND, 90, 100)])
    other = trace(tmp_path / "1.gz", [(SEND, 10, 50), ("gemm", 0, 45), (SEND, 90, 100), ("ncclAllReduce", 0, 100)])
    return [one, other]


def test_bytes_move_only_while_both_ranks_are_there(two_ranks):
    found = transfers_of([device_work(path) for path in two_ranks])
    assert found["matched"]
    assert (found["transfers"], found["never_together"]) == (2, 0)
    assert found["transfer_ms"] == pytest.approx(0.020)
    # of 10 + 10 us of transfers rank 0 computes beside the first, rank 1 beside half of it
    assert found["transfer_hidden_share"] == pytest.approx([10 / 20, 5 / 20])
    # the wait of rank 1 for rank 0 is in its kernel
    assert found["kernel_ms"] == pytest.approx([0.020, 0.050])
    assert found["kernel_hidden_share"] == pytest.approx([10 / 20, 35 / 50])


def test_ranks_with_other_numbers_of_kernels_are_not_matched(two_ranks, tmp_path):
    other = trace(tmp_path / "2.gz", [(SEND, 10, 50)])
    found = transfers_of([device_work(two_ranks[0]), device_work(other)])
    assert not found["matched"]
    assert found["transfer_hidden_share"] == [None, None]


def test_a_trace_without_device_work_says_nothing(tmp_path):
    empty = device_work(trace(tmp_path / "3.gz", []))
    assert transfers_of([empty, empty])["kernel_hidden_share"] == [None, None]


def test_a_trace_is_kept_with_as_much_as_fits(tmp_path):
    kernels = [{"ph": "X", "cat": "kernel", "name": SEND, "ts": at, "dur": 1} for at in range(10)]
    operators = [
        {"ph": "X", "cat": "cpu_op", "name": f"aten::{hash(str(at))}", "ts": at, "dur": 1} for at in range(2000)
    ]
    actions = [{"ph": "X", "cat": "user_annotation", "name": "PP:0F3", "ts": 1, "dur": 1}]
    whole = tmp_path / "whole.gz"
    whole.write_bytes(gzip.compress(json.dumps({"traceEvents": [*kernels, *operators, *actions]}).encode()))
    target = tmp_path / "small.json.gz"
    assert keep_small(whole, target, 10_000_000) == "nothing"
    assert keep_small(whole, target, 2_000) == "operators of the host"
    assert len(json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]) == 11
    assert keep_small(whole, target, 10).startswith("everything")
    assert not target.exists()
