"""The list of causes is fixed, and each has its page."""

from __future__ import annotations

import pytest

from torchweave.cli.main import main
from torchweave.diagnose.causes import NAMES, all_causes


def test_the_names_are_fixed():
    assert len(NAMES) == len(set(NAMES)) == 34


@pytest.mark.parametrize("cause", all_causes(), ids=lambda cause: cause.name)
def test_every_cause_has_a_page_with_all_its_parts(cause):
    for part in ("**Evidence needed.**", "**Mend.**", "**Not proof of it.**", "**Source.**"):
        assert part in cause.page
    assert cause.line.endswith(".")


def test_explain_and_causes(capsys):
    assert main(["explain", "host_sync"]) == 0
    assert "An operator has to wait for the device" in capsys.readouterr().out
    assert main(["causes"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(NAMES)
    assert main(["explain", "bad weather"]) == 2
