"""The whole demo on two processes over gloo, small: what it prints, and that woven is serial bit by bit."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(150)

SMALL = ["--layers", "2", "--hidden", "128", "--tokens", "128", "--steps", "2"]
KEYS = {
    "bit_equal",
    "bound_ms",
    "communication_ms",
    "compute_ms",
    "device",
    "hidden_share",
    "idle_share",
    "link",
    "losses",
    "options",
    "ranks",
    "recovered_share",
    "samples",
    "serial_ms",
    "spread",
    "strategy",
    "versions",
    "woven_ms",
}


def demo(*words):
    # on a machine however busy, `auto` would choose by chance
    environment = {**os.environ, "TORCHWEAVE_STRATEGY": "turns"}
    return subprocess.run(
        [sys.executable, "-m", "torchweave", "demo", *SMALL, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


def test_json_has_everything_and_woven_is_serial():
    done = demo("--json", "--link-gbps", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == KEYS
    assert result["bit_equal"] is True
    assert result["ranks"] == 2
    assert result["strategy"] == "turns"
    assert result["link"] == "simulated link, 1 Gb/s, 1 SM"
    assert result["bound_ms"] == max(result["compute_ms"], result["communication_ms"])
    # from recorded intervals: far from nothing, on a machine however busy
    assert result["hidden_share"] > 0.3


def test_the_table_says_that_the_link_is_simulated():
    done = demo("--link-sms", "3")
    assert done.returncode == 0, done.stderr
    assert "simulated link, 0.4 Gb/s, 3 SMs" in done.stdout
    assert "bit-equal to serial" in done.stdout
    assert not done.stderr  # no progress bar without a terminal


def test_no_link_is_called_none():
    done = demo("--json", "--link-gbps", "0", "--steps", "0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["link"] == "none: GLOO"
