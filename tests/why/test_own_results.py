"""The traces that our own benchmark recorded are explained as what they are."""

import gzip
import json
from pathlib import Path

import pytest

from torchweave.diagnose.verdicts import diagnose
from torchweave.reporting.lines import plain
from torchweave.reporting.text import report
from torchweave.trace.read import read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


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


def operations(path):
    """The device work of a trace, as the benchmark's own profiler hands it over, without its head start."""
    from torchweave.measure.hidden import Operation

    with gzip.open(path, "rt") as source:
        events = json.load(source)["traceEvents"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "spin_kernel" not in event["name"]:
            begin_ns = round(event["ts"] * 1e3)
            yield Operation(event["name"], begin_ns, begin_ns + round(event["dur"] * 1e3))


@pytest.mark.parametrize("strategy", ["serial", "turns"])
def test_the_hidden_share_is_the_benchmarks_own(strategy):
    """Catches two rules for what is communication, or what it is hidden behind: within 1 %."""
    from torchweave.measure.hidden import shares

    path = RESULTS / f"h200_hidden4096_link0.84ms_{strategy}.json.gz"
    own = shares(operations(path)).hidden_share
    assert own == pytest.approx(diagnose(read(path)).communication.hidden_share, abs=0.01)


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
