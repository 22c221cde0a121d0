"""The recorder's tables while several threads, and finalizers within one, write at once: no row is mixed with another.

Columns that were appended to one by one have mixed rows as soon as a thread is interrupted between two of them.
"""

from __future__ import annotations

import os
import sys
import threading

import pytest

from torchweave.record.tables import MadeStreams, Numbers
from torchweave.record.writer import Writer
from torchweave.trace.log import OP, RECORD, _wrong

THREADS, ROWS = 8, 400


@pytest.fixture
def always_switching():
    """Let threads be interrupted as often as they can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


def at_once(work):
    """Run something on several threads that begin together, and raise what it raised."""
    barrier, failed = threading.Barrier(THREADS, timeout=60), []

    def run(number):
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)


def test_a_finalizer_in_the_middle_of_a_row_leaves_it_whole(monkeypatch):
    writer, inside = Writer(), []
    number = writer.thread

    def thread():
        # as an event does that a garbage collection takes away here
        if not inside:
            inside.append(True)
            writer.event(9, -1, 700, 701)
            writer.span(70, -1, writer.name("finalizer"))
        return number()

    monkeypatch.setattr(writer, "thread", thread)
    writer.event(RECORD, -1, 100, 101)
    inside.clear()
    writer.span(10, -1, writer.name("mul"))
    log = writer.fresh()
    events, spans = log.events, log.spans
    assert set(zip(events.kind, events.a, events.b, strict=True)) == {(9, 700, 701), (RECORD, 100, 101)}
    assert {(begin, log.names[name]) for begin, name in zip(spans.begin, spans.name, strict=True)} == {
        (70, "finalizer"),
        (10, "mul"),
    }


def test_rows_of_threads_that_write_at_once_stay_whole(always_switching):
    writer = Writer()

    def work(thread):
        for row in range(ROWS):
            value = thread * ROWS + row
            writer.event(RECORD, value, value + 1, value + 2)
            writer.span(value, value, value)

    at_once(work)
    log = writer.fresh()
    assert len(log.events) == len(log.spans) == THREADS * ROWS
    assert all(
        (a, b) == (place + 1, place + 2)
        for place, a, b in zip(log.events.place, log.events.a, log.events.b, strict=True)
    )
    assert log.spans.begin == log.spans.place == log.spans.name


def test_an_operator_keeps_its_memory_where_threads_launch_at_once(always_switching):
    writer = Writer()

    def work(thread):
        for row in range(ROWS):
            value = (thread * ROWS + row) * 10
            memory = [value, value + 1, value + 2, 0] * (1 + row % 3)
            writer.operator(writer.name(f"op{row % 5}"), -1, memory, value)

    at_once(work)
    log = writer.fresh()
    assert _wrong(log) == ""
    first = [*log.operators.first, len(log.accesses)]
    seen = 0
    for kind, stream, operator in zip(log.events.kind, log.events.a, log.events.b, strict=True):
        assert kind == OP
        rows = range(first[operator], first[operator + 1])
        assert {log.accesses.base[row] for row in rows} == {stream}
        assert {log.accesses.low[row] for row in rows} == {stream + 1}
        assert len(rows) == 1 + stream // 10 % ROWS % 3
        assert log.names[log.operators.name[operator]] == f"op{stream // 10 % ROWS % 5}"
        seen += 1
    assert seen == THREADS * ROWS


def test_a_log_is_whole_while_others_write_on(always_switching):
    """A recording that ends in one thread takes what there is; a half-written operator is no operator yet."""
    writer = Writer()
    wrong: list[str] = []

    def work(thread):
        for row in range(ROWS):
            if thread:
                writer.operator(writer.name(f"op{row}"), -1, [row, row, row, 0], thread)
            elif row % 40 == 0:
                wrong.append(_wrong(writer.log))

    at_once(work)
    assert set(wrong) == {""}


def test_the_same_name_has_one_number_and_no_number_two_names(always_switching):
    numbers, found = Numbers(), [dict[int, int]() for _ in range(THREADS)]

    def work(thread):
        for row in range(ROWS):
            found[thread][row] = numbers.of(row)

    at_once(work)
    assert all(mine == found[0] for mine in found)
    assert len(set(found[0].values())) == ROWS
    assert [key for key in numbers.in_order(None) if key is not None] != []
    assert all(numbers.in_order(None)[row] == key for key, row in found[0].items())


def test_streams_that_threads_make_at_once_have_rows_of_their_own(always_switching):
    streams, rows = MadeStreams(), [list[tuple[int, int]]() for _ in range(THREADS)]

    def work(thread):
        for row in range(ROWS):
            pointer = thread * ROWS + row
            rows[thread].append((streams.add(pointer, pointer, external=False), pointer))

    at_once(work)
    table = streams.table()
    assert all(table.pointer[row] == pointer == table.place[row] for mine in rows for row, pointer in mine)


def test_a_program_may_remove_the_folder_that_it_runs_in(tmp_path, monkeypatch):
    """A hook that raises raises in the program's own code."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    writer = Writer()
    scope: dict[str, object] = {"sys": sys, "writer": writer}
    gone.rmdir()
    with pytest.raises(FileNotFoundError):
        os.getcwd()  # noqa: PTH109 (what the hooks must not trip over)
    exec(compile("row = writer.place(sys._getframe())", "relative.py", "exec"), scope)
    assert writer.log.places[scope["row"]][0] == "relative.py"
    assert Writer().place(None) == -1
