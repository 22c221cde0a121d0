"""`torchweave bench` on two processes over gloo, small: what it prints, and that woven is serial bit by bit."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(150)

SMALL = ["--layers", "1", "--hidden", "128", "--tokens", "128", "--rounds", "2"]
KEYS = {
    *("date", "command", "device", "ranks", "link", "versions", "options", "rounds", "spread", "strategies"),
    *("serial_ms", "compute_ms", "communication_ms", "bound_ms", "peak_serial_mib", "limit_share"),
    *("auto_takes", "choices"),
}
ROW = {
    *("woven_ms", "spread", "recovered_share", "hidden_share", "idle_share", "speedup", "bit_equal", "peak_mib"),
    "host_us_per_crossing",
}


def bench(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "torchweave", "bench", *SMALL, *words],
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("chunk", ["moe", "dropless", "dense"])
def test_every_strategy_is_measured_and_bit_equal(chunk, tmp_path):
    """Catches a chunk that cannot be woven, and a row that is missing from JSON or page."""
    page = tmp_path / "page.html"
    done = bench("--chunk", chunk, "--link-ms", "5", "--json", "--html", str(page))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == KEYS
    assert list(result["strategies"]) == ["turns", "streams", "auto"]
    for row in result["strategies"].values():
        assert set(row) == ROW
        assert row["bit_equal"] is True
        assert row["woven_ms"] > 0
    assert result["strategies"]["turns"]["hidden_share"] > 0.1
    assert result["auto_takes"] in ("serial", "turns", "streams", "reordered")
    assert any("the fastest of" in choice or "no strategy is faster" in choice for choice in result["choices"])
    text = page.read_text()
    assert "woven by streams" in text
    assert result["link"] in text


def test_a_chunk_that_communicates_nothing_stays_serial_and_is_a_table():
    """Catches a table that fails where there is nothing to recover."""
    done = bench("--chunk", "alone", "--strategies", "auto")
    assert done.returncode == 0, done.stderr
    assert "auto takes  serial" in done.stdout
    assert "communication" in done.stdout
    assert not done.stderr  # no progress bar without a terminal


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", "1"], "at least two rounds"),
        (["--link-ms", "0"], "--link-ms is a time above 0"),
        (["--link-ms", "1", "--link-gbps", "1"], "A link has one speed"),
        (["--top-k", "0"], "--top-k is at least 1"),
        (["--hidden", "100"], "--hidden is a multiple of 64"),
        (["--chunk", "sparse"], "invalid choice"),
        (["--strategies", "serial"], "invalid choice"),
        (["--html", "/no/such/folder/page.html"], "can be written"),
        (["--chunk", "dense", "--hidden", "64"], "a multiple of 128"),  # which the ranks find out
    ],
)
def test_wrong_options_are_told_before_anything_starts(words, told):
    """Catches a traceback, or ranks that start in vain."""
    done = bench(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
