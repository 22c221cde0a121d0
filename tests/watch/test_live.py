"""What only a log can show: clocks read early, races in the report, one stream by two names, what watching cost."""

from __future__ import annotations

import json

import pytest
from story import Story
from test_lines import Both, alternating

from torchweave.cli.output import show
from torchweave.diagnose.live import cost_of_watching, early_readings
from torchweave.diagnose.ranks import Found
from torchweave.diagnose.verdicts import diagnose
from torchweave.reporting.html import render_html
from torchweave.reporting.lines import plain
from torchweave.reporting.text import report
from torchweave.trace.log import Collections, Log, Steps, Streams


def timed(both, *reads, long_ms=50.0):
    """Work of `long_ms` launched at 10 us; clocks read at the times given, line by line."""
    both.kernel(21, 10, 25, long_ms * 1e3, line=3)
    both.kernel(25, 40, 60, long_ms * 1e3, line=4)
    for line, at in reads:
        both.moment(both.log.clocks, at, line, name=both.name("perf_counter"))
    places = both.log.clocks.place
    both.log.measured = [(first, second) for first in places for second in places if first < second]
    return both


def test_clocks_around_launches_are_told_with_the_second_line(tmp_path):
    """Catches the question's own mistake going unseen, or told at the first read."""
    both = timed(Both(), (2, 0), (6, 3_000))
    found = diagnose(both.read(tmp_path))
    (first, *_) = found.causes
    assert (found.verdict, first.cause, first.where.line, first.certainty) == (
        "mistimed", "timed_without_sync", 6, "shown",
    )  # fmt: skip
    assert "train.py:2" in first.evidence
    assert "3.000 ms" in first.evidence


@pytest.mark.parametrize(
    "reads",
    [
        [(2, 0), (6, 60_000)],  # after the work's end: a synchronization was before it
        [(2, 100), (6, 3_000)],  # nothing was launched between
        [(2, 0)],
        [(2, 5), (6, 15)],  # a loop that polls
    ],
)
def test_clocks_that_measure_what_they_should_are_not(tmp_path, reads):
    """Catches a false alarm about a correct measurement."""
    assert early_readings(timed(Both(), *reads).read(tmp_path)) == ()


def test_reads_that_are_not_subtracted_measure_nothing(tmp_path):
    """Catches a false alarm between the end of one measurement and the begin of the next."""
    both = timed(Both(), (6, 0), (2, 3_000))
    both.log.measured = [both.log.measured[0][::-1]]
    assert early_readings(both.read(tmp_path)) == ()


def test_reads_on_another_thread_measure_nothing_together(tmp_path):
    both = timed(Both())
    for at, thread in ((0, 7), (3_000, 9)):
        both.moment(both.log.clocks, at, 5, name=both.name("time"), thread=thread)
    both.log.measured = [tuple(both.log.clocks.place)]
    assert early_readings(both.read(tmp_path)) == ()


def with_race(tmp_path):
    both = alternating(Both(), lambda at, until: None)
    story = Story(streams=(21 * 16, 25 * 16))
    both.log.streams = story.log.streams
    story.op(21 * 16, writes=[0])
    story.record(5, 25 * 16)
    story.wait(5, 25 * 16)
    story.op(25 * 16, reads=[0], name="aten::add")
    both.log.events, both.log.operators, both.log.accesses = story.log.events, story.log.operators, story.log.accesses
    both.log.places += story.log.places
    shift = len(both.log.places) - len(story.log.places)
    both.log.events.place = [row + shift for row in both.log.events.place]
    both.log.operators.name = [both.name(story.log.names[row]) for row in both.log.operators.name]
    both.log.spans.name = [0 for _ in both.log.spans.name]
    return diagnose(both.read(tmp_path))


def test_a_race_comes_first_with_the_line_of_the_wait_that_orders_nothing(tmp_path):
    found = with_race(tmp_path)
    (first, *_) = found.causes
    assert (found.verdict, first.cause, first.where.line, first.where.function) == (
        "race", "missing_wait", 3, "wait_stream",
    )  # fmt: skip
    assert "train.py:1" in first.evidence
    assert "train.py:4" in first.evidence
    assert first.cost_ms == 0
    assert not first.costs_time


def test_a_race_shows_in_every_look(tmp_path, capsys):
    """Catches a report that leaves out what costs no time."""
    found = with_race(tmp_path)
    text = plain(report(found))
    assert "missing_wait: costs no time" in text
    assert "train.py:3" in text
    assert "missing_wait" in render_html([found])
    show(Found((found,)), as_json=True, as_list=False)
    record = json.loads(capsys.readouterr().out)
    assert (record["verdict"], record["causes"][0]["where"]["line"]) == ("race", 3)


def test_the_charges_still_add_up_beside_what_costs_no_time(tmp_path):
    found = with_race(tmp_path)
    if len(found.causes) > 1:
        assert sum(cause.lost_ms for cause in found.causes) == pytest.approx(found.numbers.lost_ms, rel=0.01)


def test_two_names_of_one_stream_are_told_where_the_second_was_made(tmp_path):
    """Catches "nothing to overlap" for a program that did use two stream objects."""
    both = Both()
    for row in range(8):
        both.log.uses.at.append(both.at(40 * row - 6))
        both.log.uses.thread.append(7)
        both.log.uses.stream.append(row % 2)
        both.log.uses.pointer.append(21 * 16)
        both.kernel(21, 40 * row, max(40 * row + 10, 10 + 400 * row), 400, line=10 + row % 2)
    both.log.streams = Streams([21 * 16, 21 * 16], [both.place(3), both.place(4)], [0, 0])
    found = diagnose(both.read(tmp_path))
    (first, *_) = found.causes
    assert (found.verdict, first.cause, first.where.line) == ("serial", "stream_alias", 4)
    assert first.lost_ms == pytest.approx(found.numbers.possible_ms)
    both.log.uses.stream = [0] * 8
    assert diagnose(both.read(tmp_path)).verdict == "nothing_to_overlap"


def test_the_cost_of_watching_is_that_of_steps_in_the_same_run(tmp_path):
    log = Log(steps=Steps([0, 1, 0], [2, 2, 2], [20.0, 23.0, 22.0]))
    watched = cost_of_watching(log)
    assert (watched.num_steps, watched.watched_ms, watched.plain_ms) == (2, 11.5, 10.5)
    assert watched.factor == pytest.approx(11.5 / 10.5)
    assert (watched.least_ms, watched.most_ms) == (10.0, 11.0)
    assert cost_of_watching(Log(steps=Steps([1], [2], [23.0]))) is None


def test_a_factor_within_the_scatter_of_untouched_steps_is_no_sign(tmp_path):
    """Catches "launch-bound" from a machine that others use too."""
    both = alternating(Both(), lambda at, until: None)
    both.log.steps = Steps([0, 1, 0], [1, 1, 1], [10.0, 20.0, 24.0])
    remarks = " ".join(diagnose(both.read(tmp_path)).remarks)
    assert "1.18 times as long" in remarks
    assert "launch-bound" not in remarks


def test_what_the_log_knows_is_told(tmp_path):
    both = alternating(Both(), lambda at, until: None)
    both.log.steps = Steps([0, 1, 0], [2, 2, 2], [20.0, 40.0, 20.0])
    both.log.environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    both.log.collections = Collections([both.at(100)], [both.at(1_900)], [7], [2])
    both.log.allocator = {"num_alloc_retries": 3}
    both.log.others = ["python (pid 5, 700 MiB)"]
    both.log.notes, both.log.error = ["Steps 3 to 4 were watched."], "ValueError: boom"
    found = diagnose(both.read(tmp_path))
    text = " ".join(found.remarks)
    for word in (
        "2.00 times as long",
        "launch-bound",
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "collector",
        "3 times",
        "pid 5",
    ):
        assert word in text, word
    assert any("boom" in warning for warning in found.warnings)
    assert found.watched.factor == pytest.approx(2.0)
    assert not any("Environment variables" in text for text in found.not_known)
    page = render_html([found])
    assert "2.00 times as long" in page


def test_nothing_is_added_to_a_trace_alone(tmp_path):
    """Catches a key or a line of live runs in the report of a plain trace: its form is fixed."""
    from torchweave.reporting.record import record
    from torchweave.trace.kineto import read_kineto

    both = alternating(Both(), lambda at, until: None)
    found = diagnose(read_kineto(both.trace.write(tmp_path / "trace.json")))
    assert "watched" not in record(found)
    assert found.watched is None
