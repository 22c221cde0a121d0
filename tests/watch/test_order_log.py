"""What a program asks the device to wait for: each call is written down once, and nothing of torch's is switched on."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
import torch.distributed as dist
from fake import FakeDevice, watched
from torch.cuda import _gpu_trace
from torch.distributed import _functional_collectives as functional

from torchweave.diagnose.races import races
from torchweave.record import writer
from torchweave.record.dispatch import Operators, _Call
from torchweave.record.plans import Does, Plan
from torchweave.trace.log import (
    ALLOCATE,
    BACKWARD,
    BACKWARD_END,
    COLLECTIVES,
    DRIVER_FREE,
    IN_BACKWARD,
    JOIN,
    OP,
    RECORD,
    SYNC_DEVICE,
    SYNC_EVENT,
    SYNC_STREAM,
    UNSEEN,
    WAIT,
)

HERE = 0x1000 + 7


def rows(log, *but):
    """Return (kind, a, b) of all events but those of some kinds."""
    events = log.events
    return [row for row in zip(events.kind, events.a, events.b, strict=True) if row[0] not in but]


def streams_of(log):
    """Return the names of the operators with the streams that they were sent to."""
    return [(log.names[log.operators.name[b]], a) for kind, a, b in rows(log) if kind == OP]


@pytest.fixture
def device(monkeypatch):
    # the made-up streams are no lines of the program
    folders = (*writer._library_folders(), fake_cuda.__file__)
    monkeypatch.setattr(writer, "_library_folders", lambda: folders)
    return fake_cuda.install(monkeypatch.setattr)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_torchs_own_callbacks_are_never_switched_on(monkeypatch):
    """Catches a program that dies of its own exception: torch calls them in the middle of one, and cannot stop to."""

    def fail():
        raise AssertionError("switched on")

    monkeypatch.setattr(torch._C, "_activate_gpu_trace", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    registries = [value for name, value in vars(_gpu_trace).items() if name.endswith("Callbacks")]
    seen = []
    watched(lambda: seen.extend(len(registry.callback_list) for registry in registries))
    assert seen == [0] * len(registries) != []


def test_a_wait_for_a_stream_is_one_record_and_one_wait(device):
    """Catches calls within calls that are left out, or told twice."""
    side = torch.cuda.Stream()
    main = torch.cuda.current_stream()

    def block():
        side.wait_stream(main)  # here

    log = watched(block, device)
    (record, wait) = rows(log)
    assert record == (RECORD, record[1], main.cuda_stream)
    assert wait == (WAIT, record[1], side.cuda_stream)
    first = block.__code__.co_firstlineno
    assert [log.place(row)[1] for row in log.events.place] == [first + 1] * 2
    assert [log.names[row] for row in log.spans.name] == ["wait_stream"]


def test_events_and_synchronizations_name_what_they_are_of(device):
    """Catches kinds that are mixed up, and arguments that are swapped."""
    side = torch.cuda.Stream()
    event, other = torch.cuda.Event(), torch.cuda.Event()

    def block():
        event.record(stream=side)
        other.record()
        event.wait()
        side.wait_event(other)
        event.synchronize()
        side.synchronize()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    one, two = id(event), id(other)
    assert rows(watched(block, device)) == [
        (RECORD, one, side.cuda_stream),
        (RECORD, two, 0),
        (WAIT, one, 0),
        (WAIT, two, side.cuda_stream),
        (SYNC_EVENT, one, 0),
        (SYNC_STREAM, side.cuda_stream, 0),
        (SYNC_DEVICE, 0, 0),
        (DRIVER_FREE, 0, 0),
    ]


@pytest.mark.parametrize("over", [False, True])
def test_an_event_that_is_asked_counts_if_it_is_over(device, monkeypatch, over):
    """Catches false alarms about programs that poll, and an order from an answer that was no."""
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: over, raising=False)
    event = torch.cuda.Event()
    assert rows(watched(lambda: event.query(), device)) == ([(SYNC_EVENT, id(event), 0)] if over else [])


def test_a_wait_for_an_event_of_another_kind_says_that_its_record_was_not_seen(device):
    """Catches a false alarm about `torch.Event`, whose methods are C and cannot be replaced."""

    class Other:
        def wait(self, stream):
            pass

    side = torch.cuda.Stream()
    assert rows(watched(lambda: side.wait_event(Other()), device)) == [(WAIT, UNSEEN, side.cuda_stream)]


def test_a_call_that_fails_orders_nothing(device, monkeypatch):
    def fail(event, stream=None):
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda.Event, "record", fail)
    event = torch.cuda.Event()

    def block():
        with pytest.raises(RuntimeError, match="no device"):
            event.record()

    assert rows(watched(block, device)) == []


def test_new_memory_is_told_and_old_memory_is_not():
    """Catches a view, a result in place, or a result without an alias in its schema taken for new memory."""
    a, kept = torch.ones(4, 4), []

    def block():
        kept.append(torch.empty(8))
        kept.append(torch.empty_like(a))
        kept.append(a * 2)
        a.add_(1)
        a.view(16)
        torch.ops.aten._unsafe_view(a, [16])
        torch.mul(a, 2, out=kept[2])
        torch.empty(0)

    log = watched(block)
    assert rows(log, OP) == [(ALLOCATE, each.data_ptr(), HERE) for each in kept]


def test_memory_that_is_given_out_again_while_another_stream_reads_it_is_found(device, monkeypatch):
    """Catches a second life of memory that is taken for its first: which line to mend would be wrong."""
    monkeypatch.setattr(device, "on_device", lambda tensor: True)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    memory = torch.zeros(64)

    def give_out():
        # the pool's work: a new tensor on the memory that is free
        return torch.ops.watched.give_out(torch.empty(0))

    library = torch.library.Library("watched", "DEF")
    library.define("give_out(Tensor x) -> Tensor")
    library.impl("give_out", lambda x: torch.from_dlpack(memory.numpy()), "CPU")

    def block():
        x = give_out()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.sum()
        del x
        give_out()

    log = watched(block, device)
    library._destroy()
    (race,) = races(log)
    assert race.freed
    assert (race.first_stream, race.second_stream) == (side.cuda_stream, main.cuda_stream)


def test_what_the_host_reads_it_has_waited_for():
    """Catches false alarms after `.item()`, `.cpu()` and a mask, and an order from what nobody waits for."""

    class Device(FakeDevice):
        def on_device(self, tensor):
            return tensor.dtype is torch.float32 or tensor.dtype is torch.bool

    x, mask, index, host = torch.ones(4), torch.ones(4, dtype=torch.bool), torch.tensor([0]), torch.ones(4).double()

    def waits(block):
        return [row for row in rows(watched(block, Device())) if row[0] == SYNC_STREAM]

    for block in (
        lambda: x.sum().item(),
        lambda: x.nonzero(),
        lambda: x[mask],
        lambda: x.masked_select(mask),
        lambda: torch.equal(x, x + 1),
        lambda: x.to(torch.float64),
        lambda: x.copy_(host),
        lambda: host.copy_(x),
    ):
        assert waits(block) == [(SYNC_STREAM, HERE, 0)]
    for block in (
        lambda: x[index],
        lambda: x.to(torch.float64, non_blocking=True),
        lambda: host.copy_(x, True),
        lambda: x.copy_(x + 1),
        lambda: x[:0].to(torch.float64),
        lambda: host.sum().item(),
    ):
        assert waits(block) == []


def test_a_copy_between_devices_orders_both_their_streams():
    """Catches a false alarm about what torch orders by itself in a copy, before it and behind it."""
    ends = [SimpleNamespace(device=SimpleNamespace(index=index, type="cuda"), numel=lambda: 1) for index in (0, 1)]
    log_writer = writer.Writer()
    mode = Operators(log_writer, lambda _: True, lambda ordinal: 100 + ordinal)
    plan = Plan(log_writer.name("aten::copy_"), does=Does.COPY, option=(2, "non_blocking"))
    mode._ordered(plan, _Call(tuple(ends), {}, None), [1, 1, 2, 3], -1, 100, -1)
    assert rows(log_writer.log) == [(JOIN, 100, 101), (OP, 100, 0), (JOIN, 101, 100)]


def test_a_backward_says_where_it_begins_and_ends_and_what_is_of_it():
    """Catches operators of autograd that are ordered by nothing, and others that are ordered by it."""
    x = torch.ones(4, requires_grad=True)

    def block():
        loss = (x * 2).sum()
        loss.backward()
        x.detach() * 2

    log = watched(block)
    kinds = [row[0] for row in rows(log, ALLOCATE)]
    begin, end = kinds.index(BACKWARD), kinds.index(BACKWARD_END)
    of_it = kinds[begin + 1 : end]
    # the multiplication, and the gradient's first value
    assert of_it[:2] == [IN_BACKWARD, OP]
    assert of_it[::2] == [IN_BACKWARD] * (len(of_it) // 2)
    assert IN_BACKWARD not in kinds[:begin] + kinds[end:]
    assert len({a for kind, a, _ in rows(log) if kind == IN_BACKWARD}) == 1
    assert {stream for kind, _, stream in rows(log) if kind in (BACKWARD, BACKWARD_END)} == {HERE}


def test_a_gradient_that_is_handed_over_without_a_wait_is_found(device):
    """Catches a backward that is taken to wait for all streams; and one that waits for none is a false alarm."""
    side = torch.cuda.Stream()
    x = torch.ones(4, requires_grad=True)

    def block(waits):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        gradient = torch.ones(4) * 3
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.backward(gradient=gradient)
        torch.cuda.current_stream().wait_stream(side)

    (race,) = races(watched(lambda: block(False), device))
    assert (race.first_stream, race.second_stream) == (0, side.cuda_stream)
    x.grad = None
    assert races(watched(lambda: block(True), device)) == ()


def test_a_collective_that_nobody_waits_for_at_once_runs_apart(group):
    """Catches results of a collective that are taken for new memory, and a wait that is not told."""
    x = torch.ones(4)

    def block():
        work = dist.all_reduce(x, async_op=True)
        work.wait(timeout=timedelta(seconds=30))

    log = watched(block)
    assert streams_of(log) == [("c10d::allreduce_", COLLECTIVES)]
    assert rows(log, OP) == [(JOIN, COLLECTIVES, HERE), (JOIN, HERE, COLLECTIVES)]


def test_a_collective_that_is_waited_for_at_once_is_an_operator_like_others(group):
    """Catches false alarms where NCCL hands no work out: it then runs on the current stream."""
    x = torch.ones(4)
    assert streams_of(watched(lambda: dist.all_reduce(x))) == [("c10d::allreduce_", HERE)]


def test_a_collective_that_cpp_launches_is_waited_for_there(group):
    """Catches false alarms about DDP, whose waits no Python sees."""
    x = torch.ones(4)
    log = watched(lambda: dist._broadcast_coalesced(group, [x], 1 << 20, 0))
    assert [stream for name, stream in streams_of(log) if name.startswith("c10d::")] == [HERE]


def test_a_functional_collective_is_waited_for_by_an_operator(group):
    x = torch.ones(4)

    def block():
        functional.wait_tensor(functional.all_reduce(x, "sum", group))

    log = watched(block)
    assert streams_of(log) == [("_c10d_functional::all_reduce", COLLECTIVES)]
    first, *waits = rows(log, OP, ALLOCATE)
    assert (first, set(waits)) == ((JOIN, COLLECTIVES, HERE), {(JOIN, HERE, COLLECTIVES)})


@pytest.mark.parametrize("wait", [None, "wait", "get_future", "is_completed"])
def test_a_result_of_a_collective_is_a_race_until_its_work_is_waited_for(device, group, wait):
    """Catches a missing `work.wait()` that does not show, and each way to wait that is not seen."""
    x = torch.ones(4)

    def block():
        work = dist.all_reduce(x, async_op=True)
        while wait and getattr(work, wait)() is False:
            pass
        x + 1
        work.wait()

    found = races(watched(block, device))
    assert len(found) == (0 if wait else 1)
