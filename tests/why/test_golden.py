"""Whole reports, word for word. After a wanted change: `python tests/why/test_golden.py` writes them anew."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from torchweave.cli.main import main

HERE = Path(__file__).parent
GOLDEN, TRACES = HERE / "golden", HERE.parent / "traces"
REPORTS = {
    "item_each_step": ["why", "causes/item_each_step.full.json.gz"],
    "item_each_step_json": ["why", "--json", "causes/item_each_step.full.json.gz"],
    "full_gemms_plain": ["why", "causes/full_gemms.plain.json.gz"],
    "overlapped": ["why", "causes/ok_narrow_kernels.full.json.gz"],
    "nothing_to_overlap": ["why", "causes/stream_pool_alias.full.json.gz"],
    "compare_moe": ["compare", "weave/moe_serial.json.gz", "weave/moe_woven_turns.json.gz"],
    "explain_sm_full": ["explain", "sm_full"],
}


def printed(arguments: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(arguments)
    return out.getvalue()


@pytest.mark.parametrize("name", REPORTS)
def test_the_report_is_as_it_was(name, monkeypatch):
    monkeypatch.chdir(TRACES)
    monkeypatch.setenv("COLUMNS", "100")
    # StringIO has no encoding: whatever the terminal's is, lanes are drawn with plain characters
    assert printed(REPORTS[name]) == (GOLDEN / f"{name}.txt").read_text()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    os.chdir(TRACES)
    for name, arguments in REPORTS.items():
        (GOLDEN / f"{name}.txt").write_text(printed(arguments))
