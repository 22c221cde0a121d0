"""Every recorded trace of a known cause comes out with that cause. Catches a rule that shadows another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.trace.read import read

TRACES = Path(__file__).parents[1] / "traces"


def truths() -> list[tuple[str, dict]]:
    found = []
    for folder in ("causes", "ranks"):
        rows = json.loads((TRACES / folder / "truth.json").read_text())
        found += [(f"{folder}/{row['file']}", row) for row in rows]
    return found


@pytest.fixture(scope="module")
def diagnoses() -> dict[str, Diagnosis]:
    return {file: diagnose(read(TRACES / file)) for file, _ in truths()}


def near(value: float, truth: float) -> bool:
    return abs(value - truth) <= max(0.01 * abs(truth), 0.02)


@pytest.mark.parametrize(("file", "truth"), truths(), ids=[file for file, _ in truths()])
class TestTruth:
    def test_the_first_cause_is_the_true_one(self, diagnoses, file, truth):
        causes = diagnoses[file].causes
        accepted = truth.get("accept") or []
        if truth["cause"] == "none":
            assert all(cause.certainty == "likely" and cause.cause in accepted for cause in causes)
        elif causes or "none" not in accepted:
            assert causes[0].cause in (truth["cause"], *accepted)

    def test_busy_and_overlapped_are_as_measured(self, diagnoses, file, truth):
        numbers = diagnoses[file].numbers
        assert near(numbers.busy_ms, truth["any_busy_ms"])
        assert near(numbers.overlapped_ms, truth["overlapped_ms"])
        assert near(numbers.span_ms, truth["span_ms"])

    def test_the_culprit_is_named(self, diagnoses, file, truth):
        causes = diagnoses[file].causes
        if truth["style"] != "full" or "culprit" not in truth or not causes:
            pytest.skip("no culprit to name")
        where = causes[0].where
        assert truth["culprit"] in f"{where.function} {where.op}"

    def test_charges_add_up(self, diagnoses, file, truth):
        diagnosis = diagnoses[file]
        if not diagnosis.causes:
            pytest.skip("no causes")
        numbers = diagnosis.numbers
        assert sum(cause.lost_ms for cause in diagnosis.causes) == pytest.approx(numbers.lost_ms, rel=0.01, abs=1e-6)
        assert sum(cause.idle_ms for cause in diagnosis.causes) == pytest.approx(numbers.idle_ms, rel=0.01, abs=1e-6)

    def test_every_cause_has_evidence_with_numbers(self, diagnoses, file, truth):
        for cause in diagnoses[file].causes:
            assert any(character.isdigit() for character in cause.evidence)
            assert "?" not in cause.evidence

    def test_communication_is_as_measured(self, diagnoses, file, truth):
        if "communication_busy_ms" not in truth:
            pytest.skip("no communication")
        found = diagnoses[file].communication
        assert near(found.busy_ms, truth["communication_busy_ms"])
        assert near(found.hidden_ms, truth["hidden_ms"])


@pytest.mark.parametrize("row", json.loads((TRACES / "weave" / "truth.json").read_text()), ids=lambda row: row["file"])
def test_the_hidden_share_of_a_woven_pair(row):
    found = diagnose(read(TRACES / "weave" / row["file"])).communication
    assert near(found.busy_ms, row["communication_busy_ms"])
    assert found.hidden_share == pytest.approx(row["hidden_share"], abs=0.005)
