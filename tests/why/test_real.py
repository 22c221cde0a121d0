"""Traces that other projects published; they are not part of this repository, and the tests skip without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweave.cli.main import main
from torchweave.diagnose.sides import choose_sides
from torchweave.diagnose.verdicts import diagnose
from torchweave.diagnose.window import look_at
from torchweave.errors import UnreadableInputError
from torchweave.intervals import intersection, length
from torchweave.trace.read import read

REAL = Path(__file__).parents[3] / "shared" / "traces" / "real"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is not here")


def diagnosed(name: str):
    return diagnose(read(REAL / f"{name}.json.gz"))


def test_dualpipe_hides_its_communication_and_no_host_stall_is_blamed():
    found = diagnosed("deepseek_dualpipe_train")
    assert found.communication.hidden_share == pytest.approx(0.963, abs=0.005)
    assert found.numbers.idle_ms / found.numbers.span_ms == pytest.approx(0.004, abs=0.001)
    assert found.verdict == "overlapped"
    assert found.causes == ()


@pytest.mark.parametrize(
    ("name", "share", "first"),
    [
        ("gpupuzzlers_blocking_streams", 0.165, "blocking_copy"),
        ("gpupuzzlers_non_blocking_streams", 0.323, None),
    ],
)
def test_copies_beside_computation(name, share, first):
    window = look_at(read(REAL / f"{name}.json.gz"))
    sides = choose_sides(window, ("compute", "copies"))
    both = length(intersection(window.busy(sides.side == 1), window.busy(sides.side == 2)))
    assert both / length(window.busy()) == pytest.approx(share, abs=0.01)
    causes = [cause.cause for cause in diagnosed(name).causes]
    assert first is None or causes[0] == first
    # what differs between the two is that one of them waits for its copies
    assert ("blocking_copy" in causes) == (first == "blocking_copy")


def test_one_stream_has_nothing_to_overlap():
    for name in ("tracelens_b200_eager", "hta_mi250_toy"):
        found = diagnosed(name)
        assert found.verdict == "nothing_to_overlap"
        assert found.causes == ()


def test_rocm_names_without_grids():
    found = diagnosed("tracelens_mi300_resnet_act_checkpoint")
    assert found.numbers.busy_ms == pytest.approx(84.0, abs=0.1)
    assert found.communication.hidden_ms == pytest.approx(16.2, abs=0.1)


def test_no_gpu_work_in_words():
    with pytest.raises(UnreadableInputError, match="no GPU work"):
        read(REAL / "hta_cpu_only.json.gz")


def test_the_broken_file_says_where(capsys):
    path = REAL / "gpupuzzlers_same_priority_broken_json.json.gz"
    assert main(["why", str(path)]) == 3
    assert "byte 6" in capsys.readouterr().err
