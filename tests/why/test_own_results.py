"""The traces that our own benchmark recorded are explained as what they are."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from torchweave.diagnose.verdicts import diagnose
from torchweave.reporting.lines import plain
from torchweave.reporting.text import report
from torchweave.trace.read import read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
sys.path.insert(0, str(RESULTS.parent))


@pytest.mark.parametrize(
    ("name", "verdict", "least", "most"),
    [
        ("h200_hidden4096_link0.84ms_serial.json.gz", "serial", 0.0, 0.01),
        ("h200_hidden4096_link0.84ms_turns.json.gz", "overlapped", 0.9, 1.0),
    ],
)
def test_the_simulated_link_is_communication(name, verdict, least, most):
    """Catches a link that counts as computation: the pair would be judged by forward against backward on one stream."""
    found = diagnose(read(RESULTS / name))
    assert found.sides.names == ("compute", "communication")
    assert found.verdict == verdict
    assert least <= found.communication.hidden_share <= most


@pytest.mark.parametrize("strategy", ["serial", "turns"])
def test_the_hidden_share_is_the_benchmarks_own(strategy, tmp_path):
    """Catches two rules for what is communication, or what it is hidden behind, or when a pair begins: within 1 %."""
    from rows import DEVICE_WORK, of_the_pair, operation

    from torchweave.measure.hidden import after_head_start, shares

    with gzip.open(RESULTS / f"h200_hidden4096_link0.84ms_{strategy}.json.gz", "rt") as source:
        trace = json.load(source)
    # as it was recorded: ranks meet by a collective, in which one of them waits for the other, and get a head start
    first = min((one for one in trace["traceEvents"] if one.get("cat") in DEVICE_WORK), key=lambda one: one["ts"])
    sleep = {**first, "name": "spin_kernel(long)", "ts": first["ts"] - 15000.0, "dur": 14990.0}
    meeting = {**sleep, "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts": sleep["ts"] - 9000.0, "dur": 8000.0}
    trace["traceEvents"] += [meeting, sleep]
    own = shares(after_head_start(operation(one) for one in trace["traceEvents"] if one.get("cat") in DEVICE_WORK))
    trace["traceEvents"] = list(of_the_pair(trace["traceEvents"]))
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(trace))
    found = diagnose(read(kept))
    assert found.communication.hidden_share == pytest.approx(own.hidden_share, abs=0.01)
    assert found.communication.busy_ms == pytest.approx(13.5, abs=0.2)
    assert found.verdict == ("serial" if strategy == "serial" else "overlapped")


def test_the_naive_attempt_is_explained():
    """Catches a README whose report is not what the tool says of that very trace."""
    found = diagnose(read(RESULTS / "h200_naive_overlap.json.gz"))
    assert found.sentence == "Forward and backward did not overlap: 23.3 ms of 23.3 ms possible were lost."
    assert found.causes[0].cause == "backward_on_forward_stream"
    assert found.causes[0].lost_ms == pytest.approx(23.305, abs=0.01)
    text = plain(report(found)).splitlines()
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    excerpt = readme.partition("```text\n" + found.sentence)[2].partition("```")[0].splitlines()
    assert len(excerpt) > 8
    for line in excerpt:
        assert line.rstrip() in text
