"""Two causes in one trace are told apart. Catches a rule that takes what belongs to another."""

from __future__ import annotations

import json
from pathlib import Path

import mixing
import pytest
from build import Builder

from torchweave.diagnose.verdicts import diagnose
from torchweave.trace.read import read

CAUSES = Path(__file__).parents[1] / "traces" / "causes"

PAIRS = [
    ("item_each_step.full", "wide_wait.full"),
    ("item_each_step.full", "device_synchronize_in_loop.full"),
    ("wide_wait.full", "host_busy_starves.full"),
    ("wide_wait.full", "full_gemms.full"),
    ("item_each_step.full", "full_gemms.full"),
    ("legacy_default_stream.full", "full_gemms.full"),
    ("item_each_step.full", "launch_blocking.full"),
    ("lazy_loading.full", "wide_wait.full"),
    ("pin_in_loop.full", "item_each_step.full"),
    ("pageable_upload.full", "item_each_step.full"),
    ("host_busy_starves.full", "tiny_kernels.full"),
    ("item_each_step.full", "host_busy_starves.full"),
    ("queue_full.full", "wide_wait.full"),
    ("one_connection.full", "item_each_step.full"),
    ("wide_wait.plain", "item_each_step.plain"),
    ("launch_blocking.plain", "full_gemms.plain"),
    ("download_each_step.plain", "wide_wait.plain"),
]


def costs(diagnosis) -> dict[str, float]:
    return {cause.cause: cause.cost_ms for cause in diagnosis.causes}


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_both_causes_get_their_part(pair, tmp_path):
    parts = [mixing.load(CAUSES / f"{name}.json.gz") for name in pair]
    mixed = tmp_path / "mixed.json"
    mixed.write_text(json.dumps(mixing.concatenate(*parts)))
    # the same two streams as the mixture has: the sides must not change with the parts
    alone = [
        diagnose(read(CAUSES / f"{name}.json.gz"), between=sides(part)) for name, part in zip(pair, parts, strict=True)
    ]
    found = diagnose(read(mixed), between=sides(parts[0]))
    total = sum(found.numbers.lost_ms + found.numbers.idle_ms for found in alone)
    for part in alone:
        first = part.causes[0].cause
        expected = sum(costs(each).get(first, 0.0) for each in alone)
        assert costs(found).get(first, 0.0) == pytest.approx(expected, rel=0.1, abs=0.01 * total), costs(found)


def sides(trace: dict) -> tuple[str, str]:
    one, other = mixing.busiest(trace["traceEvents"])
    return f"stream:{one}", f"stream:{other}"


@pytest.mark.parametrize(
    "name", ["one_connection.full", "same_direction_copies.full", "forward_after_backward_join.full"]
)
def test_several_equal_steps_charge_what_one_does(tmp_path, name):
    """Catches a synchronization at each step's end that takes a share of what the device held apart."""
    step = mixing.load(CAUSES / f"{name}.json.gz")
    steps = step
    for _ in range(3):
        steps = mixing.concatenate(steps, step)
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(steps))
    alone, four = diagnose(read(CAUSES / f"{name}.json.gz")), diagnose(read(path))
    shares = [found.causes[0].lost_ms / found.numbers.lost_ms for found in (alone, four)]
    assert four.causes[0].cause == alone.causes[0].cause
    assert shares[1] >= shares[0] - 0.1


@pytest.mark.parametrize("first", [20, 21])
def test_the_split_does_not_depend_on_which_side_runs_first(tmp_path, first):
    """Catches a loss that is charged to the part of the trace before it because of the order of its sides."""
    build = Builder()
    streams = (first, 41 - first)
    build.kernel(streams[0], 0, 10, 29_000)
    build.call("cudaStreamSynchronize", 8, 29_010)
    build.kernel(streams[1], 29_020, 29_030, 29_000)
    build.call("cudaStreamSynchronize", 29_027, 29_010)
    build.copy(streams[0], 58_040, 58_060, 6_250, "Memcpy HtoD (Pinned -> Device)")
    build.copy(streams[1], 58_046, 64_312, 6_250, "Memcpy HtoD (Pinned -> Device)")
    found = diagnose(read(build.write(tmp_path / "x.json")), between=("stream:20", "stream:21"))
    lost = {cause.cause: cause.lost_ms for cause in found.causes}
    assert lost["explicit_sync"] == pytest.approx(29.0, rel=0.02)
    assert lost["copy_engine"] == pytest.approx(6.25, rel=0.02)
