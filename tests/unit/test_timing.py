"""The stopwatch: two times, words that say what they mean, and no reading before the end."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import torchweave as tw
from torchweave import timing
from torchweave.errors import UsageError
from torchweave.timing import Reading, Stopwatch


class FakeClock:
    """A device whose end is waited for 4 s of a clock that the test turns by hand."""

    on_device = True

    def __init__(self, device_ms):
        self.device_ms = device_ms
        self.now_ns = 0

    def begin(self):
        self.now_ns += 7 * 10**9

    def end_ms(self):
        self.now_ns += 4 * 10**9
        return self.device_ms


def test_on_the_cpu_both_times_are_the_host_time():
    with tw.timed("cpu") as t:
        time.sleep(0.02)
    assert 20 <= t.host_ms == t.device_ms
    assert str(t) == t.verdict
    assert "no other device" in t.verdict


def test_the_waits_at_both_ends_are_not_host_time(monkeypatch):
    clock = FakeClock(device_ms=4091.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter_ns=lambda: clock.now_ns))
    with Stopwatch(clock) as t:
        clock.now_ns += 3_300_000
    assert (t.host_ms, t.device_ms) == (3.3, 4091.0)
    assert repr(t) == "<Stopwatch host_ms=3.300 device_ms=4091.000>"


def test_an_asynchronous_launch_is_called_one():
    words = Reading(3.3, 4091.2, on_device=True).verdict
    assert words.startswith("The host was back after 3.3 ms; the device worked 4,091 ms: the launch is asynchronous")
    assert "no measure" in words


@pytest.mark.parametrize(("host_ms", "device_ms"), [(4110.0, 4107.0), (0.002, 0.04), (100.0, 104.0), (0.5, 0.5)])
def test_no_false_alarm_where_the_host_waited_or_the_difference_is_the_stopwatch_itself(host_ms, device_ms):
    reading = Reading(host_ms, device_ms, on_device=True)
    assert not reading.outlasted
    assert "nothing left to do" in reading.verdict


@pytest.mark.parametrize("name", ["host_ms", "device_ms", "verdict", "reading"])
def test_reading_inside_the_block_is_an_error_of_ours(name):
    with tw.timed("cpu") as t, pytest.raises(UsageError, match="after its block has ended") as caught:
        getattr(t, name)
    assert caught.value.given == "a block that has not ended"
    assert caught.value.remedy


def test_an_exception_of_the_block_is_raised_untouched_and_leaves_nothing_to_read():
    class Broken(FakeClock):
        def end_ms(self):
            raise AssertionError("the device must not be asked after an error")

    with pytest.raises(KeyError, match="mine"), Stopwatch(Broken(1.0)) as t:
        raise KeyError("mine")
    with pytest.raises(UsageError, match="ended with an exception"):
        t.host_ms  # noqa: B018
    assert repr(t) == "<Stopwatch, not read>"


def test_it_is_frozen_after_the_block_and_measures_once():
    with tw.timed("cpu") as t:
        pass
    with pytest.raises(AttributeError):
        t.host_ms = 1.0
    with pytest.raises(AttributeError):
        t.reading.host_ms = 1.0
    with pytest.raises(UsageError, match="one block, once"), t:
        pass


@pytest.mark.parametrize("device", ["mps", "cuda:99", "no such thing", 3.5])
def test_a_device_that_cannot_be_watched_is_refused(device):
    with pytest.raises(UsageError, match="CPU or a CUDA device") as caught, tw.timed(device):
        pass
    assert repr(device) in caught.value.given


class FakeCuda:
    """Enough of `torch.cuda` to see the order in which the stopwatch waits and records."""

    def __init__(self, monkeypatch, capturing=False):
        self.log = []
        log = self.log

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                log.append(f"record on {stream}")

            def synchronize(self):
                log.append("wait for the event")

            def elapsed_time(self, end):
                return 60_000.0

        class Device:
            def __init__(self, device):
                pass

            __enter__ = __exit__ = lambda *_: None

        for name, value in {
            "Event": Event,
            "device": Device,
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "current_device": lambda: 1,
            "is_current_stream_capturing": lambda: capturing,
            "synchronize": lambda device: log.append(f"synchronize {device}"),
            "current_stream": lambda device: f"the stream of {device}",
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_on_cuda_it_waits_for_the_whole_device_before_each_event(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    with tw.timed() as t:
        cuda.log.append("block")
    begin = ["synchronize cuda:1", "record on the stream of cuda:1"]
    assert cuda.log == [*begin, "block", *begin, "wait for the event"]
    assert t.device_ms == 60_000.0
    assert "asynchronous" in t.verdict


def test_inside_a_graph_capture_it_refuses_instead_of_breaking_the_capture(monkeypatch):
    cuda = FakeCuda(monkeypatch, capturing=True)
    with pytest.raises(UsageError, match="capture"), tw.timed("cuda:0"):
        pass
    assert cuda.log == []


def test_the_module_is_importable_without_torch():
    code = "import sys; sys.modules['torch'] = None; import torchweave.timing"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_work_on_a_side_stream_is_covered():
    a = torch.randn(8192, 8192, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(2):
        with tw.timed() as t:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(20):
                    b = a @ a
    assert t.reading.outlasted, repr(t)
    with tw.timed() as again:
        for _ in range(20):
            b = a @ a
        torch.cuda.synchronize()
    assert not again.reading.outlasted, repr(again)
    assert b.shape == a.shape
