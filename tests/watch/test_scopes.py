"""The program's own scopes and profilers beside ours: torch crashes where a scope spans two profilers, or two run."""

from __future__ import annotations

import pytest
import torch
from fake import FakeDevice
from torch.profiler import profile, record_function

import torchweave as tw
from torchweave.errors import UsageError
from torchweave.record.phases import Phases
from torchweave.record.session import Session
from torchweave.watching import Watch


def train(steps, *, at=-1, scope=None):
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for step in range(steps):
        if step == at:
            scope.__exit__(None, None, None)
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        tw.step()


@pytest.mark.parametrize("ends", [3, 4, 6, 8])
def test_a_region_may_span_recordings(ends):
    """Catches a crash in torch: the region begins under the first profiler and ends under the second, or under none."""
    session = Session(FakeDevice(), Phases(3, 2))
    session.begin()
    outer = tw.region("outer")
    outer.__enter__()
    train(10, at=ends, scope=outer)
    recording = session.end()
    assert any("steps 3 to 4 were watched" in note for note in recording.log.notes)


def test_regions_left_in_another_order_and_never():
    session = Session(FakeDevice(), Phases(3, 2))
    session.begin()
    first, second, kept = record_function("first"), record_function("second"), record_function("kept")
    for one in (first, second, kept):
        one.__enter__()
    train(4, at=3, scope=first)
    second.__exit__(None, None, None)
    train(8)
    assert session.end() is not None
    kept.__exit__(None, None, None)


def test_all_is_put_back():
    before = record_function.__enter__, record_function.__exit__, torch.autograd.profiler._enable_profiler
    with Watch(device=FakeDevice()):
        assert record_function.__enter__ is not before[0]
    after = record_function.__enter__, record_function.__exit__, torch.autograd.profiler._enable_profiler
    assert after == before


def test_a_program_with_a_profiler_of_its_own_gets_it_and_the_report_says_so():
    """Catches two profilers at once, which end the process by a signal."""
    session = Session(FakeDevice(), Phases(3, 2))
    session.begin()
    train(1)
    with profile() as own:
        train(12)
    assert {"aten::addmm"} <= {event.key for event in own.key_averages()}
    log = session.end().log
    (note,) = [note for note in log.notes if "torch's profiler itself" in note]
    assert "test_scopes.py:" in note
    # and there is room for the next
    with Watch(device=FakeDevice()) as watch:
        torch.ones(4) + 1
    assert "Nothing to overlap" in str(watch.report())


def test_a_profiler_that_begins_in_a_watched_step_ends_the_watch_there():
    session = Session(FakeDevice(), Phases(0, 5))
    session.begin()
    train(3)
    with tw.region("open"), profile():
        train(2)
    log = session.end().log
    assert any("torch's profiler itself" in note for note in log.notes)


def test_a_watch_inside_a_profiled_block_is_refused():
    with profile():
        with pytest.raises(UsageError, match="one profiler"), Watch(device=FakeDevice()):
            pass
        torch.ones(4) + 1
    with Watch(device=FakeDevice()) as watch:
        torch.ones(4) + 1
    assert "Nothing to overlap" in str(watch.report())
