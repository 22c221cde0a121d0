"""What is written down while a program runs: exact lines, memory, threads; and all is put back."""

from __future__ import annotations

import gc
import inspect
import logging
import pickle
import threading
import time
import timeit
from itertools import pairwise

import pytest
import torch
from fake import FakeDevice, watched
from torch.utils._python_dispatch import TorchDispatchMode

import torchweave as tw
from torchweave.errors import TorchweaveError, UsageError
from torchweave.record.marks import SEAT
from torchweave.record.phases import Phases
from torchweave.record.session import Session
from torchweave.trace.log import ALLOCATE, KEEP, OP, SYNC_STREAM
from torchweave.watching import Watch

# names of Python files here are told from the folder that pytest was started in
HERE = "test_recorder.py"


def lines(log, name):
    """Return the lines of all calls of a name, in this file."""
    spans = log.spans
    rows = [row for row in range(len(spans)) if log.names[spans.name[row]] == name]
    places = [log.place(spans.place[row]) for row in rows]
    return [place[1] for place in places if place and place[0].endswith(HERE)]


def line_of(function, text):
    """Return the number of the only line of a function that holds a text."""
    source, first = inspect.getsourcelines(function)
    rows = [first + row for row, line in enumerate(source) if text in line]
    assert len(rows) == 1, (text, rows)
    return rows[0]


def test_each_operator_has_its_own_line():
    """Catches the line of the function, of the module's call, or of a library."""
    layer = torch.nn.Linear(4, 4)

    def block():
        x = torch.ones(2, 4)
        y = layer(x)  # forward
        value = y.sum().item()  # read
        assert value == value

    log = watched(block)
    assert lines(log, "aten::addmm") == [line_of(block, "# forward")]
    assert lines(log, "aten::_local_scalar_dense") == [line_of(block, "# read")]


def test_backward_on_autograds_threads_has_the_line_of_its_call():
    x = torch.ones(4, requires_grad=True)

    def block():
        loss = (x * 2).sum()
        loss.backward()  # backward

    log = watched(block)
    assert lines(log, "backward") == [line_of(block, "# backward")]
    rows = [row for row, kind in enumerate(log.events.kind) if kind == OP]
    assert {log.place(log.events.place[row])[1] for row in rows[-2:]} == {line_of(block, "# backward")}


def test_an_operator_in_a_hook_has_its_own_line():
    x = torch.ones(4, requires_grad=True)

    def hook(grad):
        return grad * 3  # in the hook

    def block():
        y = x * 2
        y.register_hook(hook)
        y.sum().backward()

    assert line_of(hook, "# in the hook") in lines(watched(block), "aten::mul")


def test_threads_of_the_program_are_watched_and_left():
    """Catches threads whose operators are missed, and a mode that outlives its thread."""
    left = []

    def work():
        torch.ones(3) + 1  # in the thread
        left.append(threading.current_thread())

    def block():
        threads = [threading.Thread(target=work) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join(30) for thread in threads]

    log = watched(block)
    assert lines(log, "aten::add") == [line_of(work, "# in the thread")] * 3
    assert len(set(log.spans.thread)) == 3
    assert all("run" not in vars(thread) for thread in left)


def accesses(log):
    """Return (operator, reads, writes) for each operator with memory, as numbers of the allocations met."""
    numbers, found = {}, []
    first = [*log.operators.first, len(log.accesses)]
    for row, name in enumerate(log.operators.name):
        uses = ([], [])
        for at in range(first[row], first[row + 1]):
            base = numbers.setdefault(log.accesses.base[at], len(numbers))
            uses[log.accesses.flags[at] & 1].append(base)
        found.append((log.names[name], *uses))
    return found


def test_what_operators_read_and_write():
    """Catches reads taken for writes: a race analysis that lies from its first fact on."""
    a, b = torch.ones(4), torch.ones(4)

    def block():
        torch.mul(a, b)
        a.add_(b)
        torch.mul(a, b, out=b)
        torch._foreach_add_([a, b], 1)
        torch.cat([a, b])

    found = accesses(watched(block))
    assert found[0] == ("aten::mul", [0, 1], [2])
    assert found[1] == ("aten::add_", [1], [0])
    # the result is told once as the argument and once as what comes back
    assert (found[2][0], found[2][1], set(found[2][2])) == ("aten::mul", [0, 1], {1})
    assert found[3][0] == "aten::_foreach_add_"
    assert set(found[3][2]) == {0, 1}
    assert (found[4][0], found[4][1]) == ("aten::cat", [0, 1])


def test_views_and_empty_memory_touch_nothing():
    """Catches races between views, which only take shapes, and with memory that nobody wrote."""
    a = torch.ones(4, 4)

    def block():
        a.view(16)
        a[1]
        a.t()
        a.detach()
        torch.empty(8)
        torch.empty_like(a)
        a.expand(2, 4, 4)

    assert accesses(watched(block)) == []


def test_the_bytes_of_views():
    a = torch.zeros(4, 4)

    def block():
        a[1].add_(1)
        a[:, 1].add_(1)
        a.t().add_(1)
        a[0:0].add_(1)

    log = watched(block)
    low, high, flags = log.accesses.low, log.accesses.high, log.accesses.flags
    base = a.data_ptr()
    writes = [(low[row] - base, high[row] - base, flags[row] >> 1) for row in range(len(low)) if flags[row] & 1]
    assert writes[0] == (16, 32, 1)
    assert writes[1] == (4, 56, 0)
    assert writes[2] == (0, 64, 1)
    assert writes[3][0] == writes[3][1]


def test_subclasses_are_taken_apart_first():
    """Catches operators on a wrapper's memory in place of what it is made of."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))

    inner = torch.ones(4)
    wrapper = Wrapper(inner)
    log = watched(lambda: wrapper * 2)
    assert log.accesses.base[0] == inner.untyped_storage().data_ptr()
    assert [log.names[row] for row in log.operators.name] == ["aten::mul"]


def test_others_modes_stay_where_they_are():
    """Catches a mode of the program's own that is popped in place of ours when a phase changes."""
    seen = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    session = Session(FakeDevice(), Phases(1, 1))
    session.begin()
    try:
        with Counter():
            for _ in range(6):
                torch.ones(2)
                session.step()
    finally:
        session.end()
    assert len(seen) >= 6
    assert torch._C._len_torch_dispatch_stack() == 0


def test_what_is_compiled_stays_compiled():
    """Catches watching that switches torch.compile off: another program would be measured."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: (x * 2).sin(), backend=backend)
    watched(lambda: function(torch.ones(4)))
    assert len(compiled) == 1
    torch._dynamo.reset()


def test_clocks_of_the_program_are_seen_and_those_of_libraries_are_not():
    def block():
        time.perf_counter()  # read
        time.sleep(0.001)
        timeit.timeit("1", number=1)  # timed
        logging.getLogger("x").makeRecord("x", 10, "f", 1, "reads the clock itself", (), None)

    log = watched(block)
    names = [log.names[row] for row in log.clocks.name]
    places = [log.place(row)[1] for row in log.clocks.place]
    assert (names[0], places[0]) == ("perf_counter", line_of(block, "# read"))
    assert set(places) <= {line_of(block, "# read"), line_of(block, "# timed")}


def test_a_measurement_is_two_reads_that_the_program_subtracts():
    """Catches the pause between two measurements taken for one."""

    class Timer:
        def start(self):
            self.begin = time.perf_counter()  # started

        def stop(self):
            return time.perf_counter() - self.begin  # stopped

    def block():
        timer = Timer()
        for _ in range(2):
            timer.start()
            timer.stop()
        begin, other = time.time(), time.monotonic()  # both
        end = time.time()  # end
        assert end - begin >= 0
        assert other > 0
        timeit.timeit("sum(range(100_000))", number=1)  # timed

    log = watched(block)
    pairs = {tuple(log.place(row)[1] for row in pair) for pair in log.measured}
    timed = line_of(block, "# timed")
    assert pairs == {
        (line_of(Timer, "# started"), line_of(Timer, "# stopped")),
        (line_of(block, "# both"), line_of(block, "# end")),
        (timed, timed),
    }


def test_a_loop_that_polls_a_clock_is_no_long_log():
    """Catches a log that grows with every pass of a waiting loop."""

    def block():
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass

    assert len(watched(block).clocks) < 60


def test_everything_is_put_back():
    """Catches wrappers that stay in a notebook's process after the watch."""
    c10d = torch._C._distributed_c10d
    owners = (
        time, threading.Thread, torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator, torch.autograd,
        torch.autograd.graph, torch._C.Future, c10d.Work, c10d.ProcessGroup,
    )  # fmt: skip
    before = [dict(vars(owner)) for owner in owners]
    watched(lambda: torch.ones(2))
    for owner, old in zip(owners, before, strict=True):
        changed = [name for name, value in old.items() if vars(owner).get(name) is not value and name != "__dict__"]
        assert changed == [], owner
    assert SEAT.watcher is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not [thread for thread in threading.enumerate() if "torchweave" in thread.name]
    assert not [callback for callback in gc.callbacks if "torchweave" in repr(callback)]


def test_everything_is_put_back_after_a_failed_start():
    """Catches a process that can never be watched again because the profiler was busy once."""

    class Broken(FakeDevice):
        def begin_trace(self):
            raise RuntimeError("the profiler is busy")

    clock = time.time
    with pytest.raises(RuntimeError, match="busy"):
        Session(Broken()).begin()
    assert SEAT.watcher is None
    assert time.time is clock
    assert len(watched(lambda: torch.ones(2) + 1).spans) >= 1


def test_a_wrapped_clock_can_still_be_pickled():
    """Catches programs that send functions to their workers."""
    found = []
    watched(lambda: found.append(pickle.loads(pickle.dumps(time.perf_counter))))
    assert found[0]() > 0


def test_an_operator_knows_its_stream():
    device = FakeDevice()
    x = torch.ones(4)

    def block():
        device.use(21)
        x.add_(1)
        device.use(25)
        x.add_(1)

    events = watched(block, device).events
    assert [a for kind, a in zip(events.kind, events.a, strict=True) if kind == OP] == [0x1000 + 21, 0x1000 + 25]


def test_record_stream_is_known():
    class Stream:
        cuda_stream = 77

    from torchweave.record.dispatch import Operators
    from torchweave.record.writer import Writer

    writer, tensor = Writer(), torch.ones(2)
    Operators(writer, lambda _: True, lambda _: 0)._keep((tensor, Stream()), -1)
    assert (writer.log.events.kind, writer.log.events.b) == ([KEEP], [77])


def test_collections_are_timed():
    log = watched(gc.collect)
    assert 2 in log.collections.generation
    assert all(end >= begin for begin, end in zip(log.collections.begin, log.collections.end, strict=True))


def test_a_long_gap_is_sampled(monkeypatch):
    """Catches `host_busy` without a line: nothing but samples sees plain Python."""
    monkeypatch.setattr("torchweave.record.sampler.compiles", lambda: False)

    session = Session(FakeDevice())

    def busy():
        end = time.monotonic_ns() + 30_000_000_000
        n = 0
        # as long as it takes on a busy machine
        while len(session._writer.log.samples) < 5 and time.monotonic_ns() < end:
            n += 1  # busy

    session.begin()
    torch.ones(2)
    busy()
    torch.ones(2)
    log = session.end().log
    functions = [log.place(row)[2] for row in log.samples.place]
    assert functions.count("busy") > 3


def test_a_recording_that_grows_too_long_is_ended_and_says_so():
    def block():
        for _ in range(100):
            torch.ones(2)

    log = watched(block, most=30, phases=Phases())
    assert 30 <= len(log.spans) < 40
    assert any("ended after 30 entries" in note for note in log.notes)


def test_a_recording_that_other_threads_make_too_long_is_ended_too():
    """Catches a log without end where the main thread does nothing but wait."""

    def work():
        for _ in range(200):
            torch.ones(4) + 1

    def block():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    log = watched(block, most=30)
    assert 30 <= len(log.spans) < 40
    assert any("ended after 30 entries" in note for note in log.notes)


def train(session, steps, *, pause=0.0):
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(steps):
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(pause)


def test_the_optimizers_steps_are_counted():
    session = Session(FakeDevice(), Phases(3, 2))
    session.begin()
    train(session, 12)
    log = session.end().log
    assert len(lines(log, "backward")) == 2
    assert (log.steps.watched, log.steps.count) == ([0, 1, 0], [2, 2, 2])
    assert any("steps 3 to 4 were watched (as asked)" in note for note in log.notes)


def test_the_programs_own_word_goes_before_the_optimizers():
    """Catches steps that are counted twice, once by each."""
    session = Session(FakeDevice(), Phases(2, 1))
    session.begin()
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(8):
        for _ in range(3):
            layer(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        tw.step()
    log = session.end().log
    assert any("step 2 was watched" in note for note in log.notes)
    assert len(lines(log, "backward")) == 3


def test_a_program_that_ends_in_its_warm_up_gives_what_there_is():
    session = Session(FakeDevice(), Phases())
    session.begin()
    train(session, 2)
    log = session.end().log
    assert len(lines(log, "backward")) == 1
    assert any("before its warm-up was over" in note for note in log.notes)


def test_a_program_that_ends_while_it_is_watched_gives_the_steps_so_far():
    session = Session(FakeDevice(), Phases(1, 5))
    session.begin()
    train(session, 3)
    log = session.end().log
    assert len(lines(log, "backward")) == 2
    assert any("steps 1 to 2 were watched" in note for note in log.notes)


def test_while_steps_are_not_watched_nothing_is_written():
    """Catches a comparison of watched with watched."""
    session = Session(FakeDevice(), Phases(2, 1))
    session.begin()
    train(session, 5)
    size = len(session._writer.log.spans)
    train(session, 5)
    assert len(session._writer.log.spans) == size == 0
    assert torch._C._len_torch_dispatch_stack() == 0
    session.end()


def test_a_watch_is_asked_after_its_block():
    watch = Watch(device=FakeDevice())
    with pytest.raises(UsageError, match="never started"):
        watch.report()
    with watch:
        with pytest.raises(UsageError, match="has not ended"):
            watch.report()
        torch.ones(4) + 1
    assert "Nothing to overlap" in str(watch.report())
    with pytest.raises(UsageError, match="once"):
        watch.__enter__()


def test_a_watch_inside_a_watch_is_refused_and_the_outer_goes_on():
    with Watch(device=FakeDevice()) as outer:
        with pytest.raises(UsageError, match="by one at a time"), Watch(device=FakeDevice()):
            pass
        torch.ones(4) + 1
    assert outer.report().diagnosis.numbers.busy_ms > 0


def test_an_exception_passes_through_and_the_report_is_of_what_ran():
    watch = Watch(device=FakeDevice())

    def fail():
        torch.ones(4) + 1
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"), watch:
        fail()
    assert "ValueError: boom" in str(watch.report())


def test_a_report_shows_in_a_notebook_and_as_json(tmp_path):
    with Watch(device=FakeDevice()) as watch:
        torch.ones(4) + 1
    report = watch.report()
    assert report._repr_html_().startswith("<iframe srcdoc=")
    assert '"schema": 1' in report.to_json()
    watch.save(tmp_path / "a.twr")
    watch.save(tmp_path / "b.twr")
    assert (tmp_path / "a.twr").stat().st_size > 0
    assert repr(report).startswith("<torchweave report: Nothing")


def test_without_a_device_the_block_runs_and_the_report_says_so():
    """Catches a program that cannot run on a laptop because it asks for a report."""
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with tw.watch() as watch:
        total = float(torch.ones(3).sum())
    assert total == 3
    with pytest.raises(TorchweaveError, match="CUDA device"):
        watch.report()


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": 1.5}, {"skip": -1, "steps": 1}, {"skip": 2}, {"steps": True}]
)
def test_numbers_of_steps_that_are_none_are_refused(options):
    with pytest.raises(UsageError):
        tw.watch(**options)


def test_marks_do_nothing_where_nobody_watches():
    tw.step()
    with tw.region("x"):
        pass


def test_a_region_can_be_looked_at_alone():
    with Watch(device=FakeDevice()) as watch:
        torch.ones(4) + 1
        with tw.region("part"):
            torch.ones(4) * 2
    whole, part = watch.report(), watch.report(range_name="part")
    assert part.diagnosis.streams[0].num_ops < whole.diagnosis.streams[0].num_ops
    with pytest.raises(UsageError, match="part"):
        watch.report(range_name="other")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_is_watched_and_stays_right(backend):
    """Catches our own functions taken into the program's graphs, and operators of compiled code that are missed."""
    layer = torch.nn.Linear(4, 4)
    compiled = torch.compile(layer, backend=backend)
    x = torch.ones(2, 4)
    compiled(x).sum().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    results = []

    def block():
        y = compiled(x)
        y.sum().backward()
        results.append(y)

    log = watched(block)
    assert torch.equal(results[0], layer(x))
    assert torch.equal(layer.weight.grad, expected)
    assert "aten::addmm" in {log.names[row] for row in log.spans.name}
    torch._dynamo.reset()


def test_results_in_lists_are_written():
    """Catches collectives, whose tensors come back in a list beside their work, taken for reads."""
    from torchweave.record.dispatch import _tensors

    a, b = torch.ones(1), torch.ones(1)
    assert list(_tensors(([a, [b]], object(), None))) == [a, b]


def test_two_threads_can_be_in_backward_at_once():
    """Catches a line of one backward() that is told for all that comes after it."""
    from torchweave.record.patches import _backward
    from torchweave.record.writer import Writer

    writer, seen = Writer(), []
    writer.on = True

    def inner(depth):
        seen.append(list(writer.backwards))
        if depth:
            run(depth - 1)

    run = _backward(writer, inner)
    run(1)
    assert [len(row) for row in seen] == [1, 2]
    assert writer.backwards == []


def test_timed_steps_have_lines_and_one_more_step_has_its_memory_followed(monkeypatch):
    """Catches timed steps that pay for every operator, and races looked for in steps that were not followed."""
    monkeypatch.setattr("torchweave.record.session.compiles", lambda: False)
    session = Session(FakeDevice(), Phases(2, 1))
    session.begin()
    x = torch.ones(4)

    def step():
        y = x * 2
        return y.sum().item()  # read

    for _ in range(5):
        value = step()
        session.step()
    log = session.end().log
    assert value == 8
    assert log.events.kind == []
    assert lines(log, "item") == [line_of(step, "# read")]
    assert [log.names[row] for row in log.flow.operators.name] == [
        "aten::mul",
        "aten::sum",
        "aten::_local_scalar_dense",
    ]
    assert log.followed().events.kind == [ALLOCATE, OP, ALLOCATE, OP, OP, SYNC_STREAM]
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_program_that_compiles_never_meets_the_function_mode(monkeypatch):
    """Catches a compiled function that is compiled anew because it is watched."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: (x * 3).cos(), backend=backend)
    session = Session(FakeDevice(), Phases(2, 1))
    session.begin()
    for _ in range(6):
        function(torch.ones(4))
        session.step()
    session.end()
    assert len(compiled) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("skip", [None, 0, 1, 2, 3, 5])
@pytest.mark.parametrize("told", ["optimizer", "program", "both"])
def test_no_profiler_is_started_where_one_was_stopped(skip, told):
    """Catches a crash long after: scopes around a mark would end under another profiler than they began under."""
    calls, marks = [], [0]

    class Device(FakeDevice):
        def begin_trace(self):
            calls.append(("begin", marks[0]))
            super().begin_trace()

        def end_trace(self):
            calls.append(("end", marks[0]))
            return super().end_trace()

    def mark(*arguments):
        marks[0] += 1

    session = Session(Device(), Phases(skip, 1))
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    # before the session's own: each mark is another scope
    optimizer.register_step_post_hook(mark)
    session.begin()
    for _ in range(20):
        layer(torch.ones(1, 2)).sum().backward()
        if told != "program":
            optimizer.step()
            optimizer.step()
        if told != "optimizer":
            mark()
            session.step()
    session.end()
    assert len(calls) in ((2,) if skip in (0, 1) and told != "both" else (2, 4, 6))
    for (before, at), (after, later) in pairwise(calls):
        assert before != after
        assert (before, after) != ("end", "begin") or later > at, calls
