"""A trace and a log joined: lines of calls, records of events, numbers of streams, gaps."""

from __future__ import annotations

import pytest
from build import Builder

from torchweave.diagnose.verdicts import diagnose
from torchweave.trace.kineto import read_kineto
from torchweave.trace.lines import ANCHOR, with_log
from torchweave.trace.log import OP, RECORD, WAIT, Events, Log, Moments, Operators, Spans

MAIN, ENGINE = 7, 8
US = 1_000


class Both:
    """A trace and the log of the same run; times in us, the trace's clock `off_us` ahead of the log's."""

    def __init__(self, off_us=0.0):
        self.trace, self.log, self.off_us = Builder(), Log(), off_us

    def place(self, line, function="step", file="train.py"):
        self.log.places.append((file, line, function))
        return len(self.log.places) - 1

    def name(self, text):
        if text not in self.log.names:
            self.log.names.append(text)
        return self.log.names.index(text)

    def span(self, begin, end, line, name, thread=MAIN, function="step"):
        spans: Spans = self.log.spans
        place = self.place(line, function) if line else -1
        for column, value in zip(
            (spans.begin, spans.end, spans.thread, spans.place, spans.name),
            (self.at(begin), self.at(end), thread, place, self.name(name)),
            strict=True,
        ):
            column.append(value)

    def event(self, kind, at, a, b, line=0, thread=MAIN):
        events: Events = self.log.events
        for column, value in zip(
            (events.kind, events.at, events.thread, events.place, events.a, events.b),
            (kind, self.at(at), thread, self.place(line) if line else -1, a, b),
            strict=True,
        ):
            column.append(value)

    def operator(self, at, stream, name="aten::cumsum", line=1, thread=MAIN):
        operators: Operators = self.log.operators
        operators.name.append(self.name(name))
        operators.first.append(len(self.log.accesses))
        self.event(OP, at, stream, len(operators.name) - 1, line, thread)

    def moment(self, table: Moments, at, line, function="step", name=-1, thread=MAIN):
        for column, value in zip(
            (table.at, table.thread, table.place, table.name),
            (self.at(at), thread, self.place(line, function), name),
            strict=True,
        ):
            column.append(value)

    def at(self, us):
        return round((us - self.off_us) * US)

    def kernel(self, stream, launch, begin, dur, line, thread=MAIN, **args):
        """A kernel launched by an operator of 20 us on a line, on a stream whose pointer is 16 times its number."""
        self.trace.op("aten::cumsum", launch - 5, 20, tid=thread)
        self.trace.kernel(stream, launch, begin, dur, tid=thread, **args)
        self.span(launch - 4, launch + 14, line, "aten::cumsum", thread)
        self.operator(launch + 14, stream * 16, line=line, thread=thread)

    def read(self, tmp_path):
        return with_log(read_kineto(self.trace.write(tmp_path / "trace.json")), self.log)


def alternating(both, sync, rounds=6):
    """Two streams by turns, the host in `sync(at, until)` after each kernel."""
    at = 0.0
    for row in range(rounds):
        stream = (21, 25)[row % 2]
        both.kernel(stream, at, at + 10, 400, line=10 + row % 2)
        sync(at + 20, at + 412)
        at += 440
    return both


def test_a_synchronization_has_its_exact_line(tmp_path):
    """Catches a report that names the function's first line, or the operator's, in place of the call's."""
    both = Both()

    def sync(at, until):
        both.trace.call("cudaDeviceSynchronize", at, until - at, tid=MAIN)
        both.span(at - 2, until + 2, 12, "synchronize")

    found = diagnose(alternating(both, sync).read(tmp_path))
    (first, *_) = found.causes
    assert (first.cause, first.where.file, first.where.line) == ("explicit_sync", "train.py", 12)
    assert (first.where.function, first.where.call) == ("synchronize", "cudaDeviceSynchronize")


def test_a_read_is_told_by_the_name_that_the_program_wrote(tmp_path):
    both = Both()

    def sync(at, until):
        both.trace.op("aten::item", at - 2, until - at + 4, tid=MAIN)
        both.trace.op("aten::_local_scalar_dense", at - 1, until - at + 2, tid=MAIN)
        both.trace.call("cudaStreamSynchronize", at, until - at, tid=MAIN)
        both.span(at - 2, until + 2, 13, "aten::_local_scalar_dense")

    found = diagnose(alternating(both, sync).read(tmp_path))
    assert (found.causes[0].cause, found.causes[0].where.line) == ("host_sync", 13)
    assert found.causes[0].where.function == "item"


def test_clocks_that_disagree_are_joined_by_the_anchor(tmp_path):
    """Catches lines of neighbours: the recorder's clock can be milliseconds off."""
    both = Both(off_us=3_210.0)

    def sync(at, until):
        both.trace.call("cudaDeviceSynchronize", at, until - at, tid=MAIN)
        both.span(at - 2, until + 2, 12, "synchronize")

    alternating(both, sync)
    both.trace.row("user_annotation", ANCHOR, -30, 4, tid=MAIN)
    both.trace.row("user_annotation", ANCHOR, -20, 4, tid=MAIN)
    # the first was written down late: it bounds nothing well
    both.log.anchors = [(both.at(-900), both.at(-25)), (both.at(-20.5), both.at(-15.5))]
    found = diagnose(both.read(tmp_path))
    assert (found.causes[0].cause, found.causes[0].where.line) == ("explicit_sync", 12)


def test_a_gap_of_the_host_has_the_line_in_which_most_samples_lie(tmp_path):
    """Catches `host_busy` without a place: between two operators nothing but samples knows it."""
    both = Both()
    at = 0.0
    for row in range(6):
        both.kernel((21, 25)[row % 2], at, at + 10, 300, line=10 + row % 2)
        for k in range(4):
            both.moment(both.log.samples, at + 500 + 700 * k, 41 if k else 40, "prepare_batch")
        at += 4_000
    found = diagnose(both.read(tmp_path))
    (first, *_) = found.causes
    assert (first.cause, first.where.line, first.where.function) == ("host_busy", 41, "prepare_batch")


def test_a_gap_without_samples_has_the_line_before_it(tmp_path):
    both = Both()
    at = 0.0
    for row in range(6):
        both.kernel((21, 25)[row % 2], at, at + 10, 300, line=10 + row % 2)
        at += 4_000
    assert diagnose(both.read(tmp_path)).causes[0].where.line in (10, 11)


def test_streams_are_known_by_the_work_that_operators_sent_to_them(tmp_path):
    timeline = alternating(Both(), lambda at, until: None).read(tmp_path)
    assert timeline.streams == {21 * 16: 21, 25 * 16: 25}


@pytest.mark.parametrize("recorded", [True, False])
def test_a_wait_gets_the_record_of_its_event(tmp_path, recorded):
    """Catches what recorders of CUDA 12.9 and later lose; with rows of waits in the trace, and without."""
    both = Both()
    both.kernel(21, 0, 10, 400, line=10)
    record = both.trace.call("cudaEventRecord", 20, 3, tid=MAIN)
    both.event(RECORD, 24, 99, 21 * 16, line=11)
    both.trace.wait(25, 30, recorded=recorded, tid=MAIN)
    both.event(WAIT, 33, 99, 25 * 16, line=12)
    both.span(28, 34, 12, "wait_event")
    both.kernel(25, 60, 412, 400, line=13)
    timeline = both.read(tmp_path)
    assert timeline.waits.record_correlation.tolist() == [record]
    assert (timeline.waits.stream.tolist(), timeline.waits.on_stream.tolist()) == ([25], [21])
    (first, *_) = diagnose(timeline).causes
    assert (first.cause, first.certainty, first.where.line) == ("wide_dependency", "shown", 12)


def test_threads_of_the_log_that_the_trace_does_not_know_get_codes_of_their_own(tmp_path):
    """Catches two threads that share a code: the lines of one would be told for the other."""
    both = Both()
    both.kernel(21, 0, 10, 400, line=10)
    both.kernel(25, 60, 70, 400, line=13)
    for number in (901, 902):
        both.span(100, 200, number, "synchronize", thread=number)
    timeline = both.read(tmp_path)
    assert timeline.threads[-2:] == ("901", "902")
    assert len(set(timeline.frames.thread.tolist())) == 3


def test_backward_has_the_line_of_its_call(tmp_path):
    """Catches work of autograd's threads without a place: they run no Python."""
    both = Both()
    at = 0.0
    for _ in range(4):
        both.kernel(21, at, at + 10, 300, line=10)
        both.trace.op("autograd::engine::evaluate_function: MulBackward0", at + 20, 20, tid=ENGINE)
        both.trace.kernel(25, at + 25, at + 312, 300, tid=ENGINE)
        both.trace.call("cudaStreamSynchronize", at + 34, 580, tid=ENGINE)
        both.span(at + 16, at + 620, 17, "backward")
        at += 640
    found = diagnose(both.read(tmp_path), between=["stream:21", "stream:25"])
    assert found.causes[0].where.line == 17
