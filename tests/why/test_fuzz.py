"""Damaged traces end in an error of ours or in a report, never in a traceback, and soon."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import fuzzing
import pytest
import test_nsys

from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.errors import TorchweaveError
from torchweave.reporting.lines import plain
from torchweave.reporting.record import to_json
from torchweave.reporting.text import report
from torchweave.trace.read import read

LONGEST_S = 5.0


def survive(seed: int, path: Path) -> None:
    path.write_bytes(fuzzing.mutated(seed))
    started = time.monotonic()
    with contextlib.suppress(TorchweaveError):
        check(diagnose(read(path)))
    assert time.monotonic() - started < LONGEST_S


def check(diagnosis: Diagnosis) -> None:
    to_json([diagnosis], as_list=False)
    plain(report(diagnosis)).encode("utf-8", "replace")
    numbers = diagnosis.numbers
    assert 0 <= numbers.busy_ms <= numbers.span_ms + 1e-6
    assert numbers.lost_ms <= numbers.possible_ms + 1e-6
    if diagnosis.causes:
        assert sum(cause.lost_ms for cause in diagnosis.causes) == pytest.approx(numbers.lost_ms, rel=0.01, abs=1e-5)
        assert sum(cause.idle_ms for cause in diagnosis.causes) == pytest.approx(numbers.idle_ms, rel=0.01, abs=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_a_sample_of_damaged_traces(seed, tmp_path):
    survive(seed, tmp_path / "trace.json")


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_of_damaged_exports(seed, tmp_path):
    rng = random.Random(seed)
    path = test_nsys.export(tmp_path / "report.sqlite", new=bool(seed % 2))
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 5, 50, 500])):
        data[rng.randrange(16, len(data))] = rng.randrange(256)
    path.write_bytes(data[: rng.choice([len(data), rng.randrange(100, len(data))])])
    with contextlib.suppress(TorchweaveError):
        check(diagnose(read(path)))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_damaged_traces(tmp_path):
    for seed in range(1000, 5000):
        survive(seed, tmp_path / "trace.json")
