"""The simulated link on one GPU: how long it lasts, in which order, and what it holds up."""

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from torchweave.errors import UsageError
from torchweave.measure.link import SimulatedLink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_BYTES = 64 << 20


@pytest.fixture
def sent():
    return torch.arange(NUM_BYTES // 4, device="cuda", dtype=torch.int32)


def gbps_for(ms):
    return NUM_BYTES * 8 / ms / 1e6


def device_ms(call):
    """Return the device time of a call, with the host ahead."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.parametrize("ms", [0.27, 0.84, 5.0])
@pytest.mark.parametrize("sms", [1, 8])
def test_a_collective_lasts_as_long_as_its_bytes_take(sent, ms, sms):
    received = torch.empty_like(sent)
    with SimulatedLink(gbps_for(ms), sms=sms):
        times = [device_ms(lambda: dist.all_to_all_single(received, sent)) for _ in range(7)]
    assert torch.equal(received, sent)
    assert statistics.median(times[2:]) == pytest.approx(ms, rel=0.05)


def test_collectives_of_one_group_follow_each_other(sent):
    received = [torch.empty_like(sent) for _ in range(4)]

    def four():
        works = [dist.all_to_all_single(out, sent, async_op=True) for out in received]
        for work in works:
            work.wait()

    with SimulatedLink(gbps_for(1.0)):
        times = [device_ms(four) for _ in range(5)]
    assert statistics.median(times[1:]) == pytest.approx(4.0, rel=0.05)
    assert all(torch.equal(out, sent) for out in received)


def test_computation_runs_beside_the_link(sent):
    """Independent work on the current stream is not held up before the wait."""
    received, begin, middle = torch.empty_like(sent), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")  # loads cuBLAS
    with SimulatedLink(gbps_for(20.0)):
        dist.all_to_all_single(received, sent)  # compiles and warms up
        torch.cuda.synchronize()
        begin.record()
        work = dist.all_to_all_single(received, sent, async_op=True)
        product = torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")
        middle.record()
        work.wait()
        torch.cuda.synchronize()
    assert begin.elapsed_time(middle) < 10.0
    assert (product == 256).all()


def test_the_host_is_not_held(sent):
    received = torch.empty_like(sent)
    with SimulatedLink(gbps_for(100.0)):
        dist.all_to_all_single(received, sent)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        dist.all_to_all_single(received, sent)
        host_ms = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize()
        total_ms = (time.perf_counter() - begin) * 1e3
    assert host_ms < 20
    assert total_ms >= 95


def test_the_link_costs_the_host_little(sent):
    """A collective may cost at most 150 us more than without the link: 67 were measured, in Python alone."""
    small, out = sent[:1024], torch.empty(1024, device="cuda", dtype=torch.int32)

    def host_us():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            dist.all_to_all_single(out, small)
        return (time.perf_counter() - begin) / 200 * 1e6

    host_us()
    plain = min(host_us() for _ in range(3))
    with SimulatedLink(1e6):
        host_us()
        linked = min(host_us() for _ in range(3))
    print(f"host time of a collective: {plain:.1f} us, over the link {linked:.1f} us")
    assert linked - plain < 150


def test_wait_orders_the_stream_that_waits(sent):
    """What another stream reads after its wait is the collective's result, though the sender wrote late."""
    side, received = torch.cuda.Stream(), torch.zeros_like(sent)
    source = torch.zeros_like(sent)
    torch.cuda.synchronize()
    with SimulatedLink(gbps_for(2.0)):
        torch.cuda._sleep(50_000_000)
        source.copy_(sent)
        work = dist.all_to_all_single(received, source, async_op=True)
        with torch.cuda.stream(side):
            work.wait()
            seen = received.clone()
        side.synchronize()
    assert torch.equal(seen, sent)


def test_mute_and_record(sent):
    sent = sent.view(torch.float32)
    received = torch.full_like(sent, 7)
    with SimulatedLink(gbps_for(1.0)) as link:
        with link.mute():
            dist.all_to_all_single(received, sent)
        assert (received == 7).all()
        with link.record() as recording:
            dist.all_to_all_single(received, sent)
            dist.all_reduce(received)
        times = [device_ms(recording.replay) for _ in range(3)]
    assert statistics.median(times) == pytest.approx(2.0, rel=0.05)


def test_uneven_and_misaligned_buffers(sent):
    with SimulatedLink(gbps_for(1.0)):
        received = torch.empty(999, device="cuda", dtype=torch.int32)
        dist.all_to_all_single(received, sent[1:1000])
        assert torch.equal(received, sent[1:1000])
        dist.all_reduce(sent[3:6])
        torch.cuda.synchronize()


def test_a_collective_too_long_for_a_gpu_is_refused(sent):
    with SimulatedLink(gbps_for(3000.0)), pytest.raises(UsageError, match="at most 2 s"):
        dist.all_to_all_single(torch.empty_like(sent), sent)
