"""Damaged traces end in an error of ours or in a report, never in a traceback, and soon."""

from __future__ import annotations

import time
from pathlib import Path

import fuzzing
import pytest

from torchweave.diagnose.verdicts import diagnose
from torchweave.errors import TorchweaveError
from torchweave.reporting.record import to_json
from torchweave.reporting.text import plain, report
from torchweave.trace.read import read

LONGEST_S = 5.0


def survive(seed: int, path: Path) -> None:
    path.write_bytes(fuzzing.mutated(seed))
    started = time.monotonic()
    try:
        diagnosis = diagnose(read(path))
        to_json([diagnosis], as_list=False)
        plain(report(diagnosis)).encode("utf-8", "replace")
    except TorchweaveError as error:
        assert str(path) in str(error)
        return
    finally:
        assert time.monotonic() - started < LONGEST_S
    numbers = diagnosis.numbers
    assert 0 <= numbers.busy_ms <= numbers.span_ms + 1e-6
    assert numbers.lost_ms <= numbers.possible_ms + 1e-6
    if diagnosis.causes:
        assert sum(cause.lost_ms for cause in diagnosis.causes) == pytest.approx(numbers.lost_ms, rel=0.01, abs=1e-5)
        assert sum(cause.idle_ms for cause in diagnosis.causes) == pytest.approx(numbers.idle_ms, rel=0.01, abs=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_a_sample_of_damaged_traces(seed, tmp_path):
    survive(seed, tmp_path / "trace.json")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_damaged_traces(tmp_path):
    for seed in range(1000, 5000):
        survive(seed, tmp_path / "trace.json")
