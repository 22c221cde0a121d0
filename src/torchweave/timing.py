"""IDEA: an honest stopwatch. A launch is asynchronous, so the host's time and the device's time are two readings."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchweave.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Literal

    import torch

# The device's reading contains the launch of two events and the return of a synchronize: some tens of microseconds.
# Only a device that worked on for longer than this, and for longer than this share of its time, outlasted the host.
_SLACK_MS = 0.1
_SLACK_SHARE = 0.05


@dataclass(frozen=True)
class Reading:
    """What a stopwatch read.

    Args:
        host_ms: How long the block held the host, in milliseconds.
        device_ms: From the start of the block, with an idle device, to the end of the last work that the block gave
            to the device, in milliseconds.
        on_device: Whether there was a device besides the host.
    """

    host_ms: float
    device_ms: float
    on_device: bool

    @property
    def outlasted(self) -> bool:
        """Whether the device still worked when the host was back, so that `host_ms` is no measure of it."""
        return self.on_device and self.device_ms - self.host_ms > max(_SLACK_MS, _SLACK_SHARE * self.device_ms)

    @property
    def verdict(self) -> str:
        """Say in words what the two times mean."""
        host, device = _in_words(self.host_ms), _in_words(self.device_ms)
        if not self.on_device:
            return f"The host worked {host} by itself: there is no other device to wait for."
        if self.outlasted:
            return (
                f"The host was back after {host}; the device worked {device}: the launch is asynchronous, so the "
                "host's time is no measure of the device's."
            )
        return (
            f"The host was held for {host}, and the device had nothing left to do when it was back: the device's "
            "work took no longer than that, and perhaps less."
        )


class _DeviceClock(Protocol):
    on_device: bool

    def begin(self) -> None: ...
    def end_ms(self) -> float | None: ...


class Stopwatch:
    """The object that `timed()` gives to the block; read it after the block."""

    def __init__(self, clock: _DeviceClock | None = None, *, device: str | torch.device | None = None) -> None:
        self._clock = clock
        self._device = device
        self._begin_ns: int | None = None
        self._reading: Reading | None = None
        self._failed = False

    def __enter__(self) -> Stopwatch:
        if self._begin_ns is not None:
            raise UsageError(
                "A stopwatch measures one block, once",
                given="a stopwatch that was started before",
                remedy="write `with timed() as t:` anew for each block",
            )
        if self._clock is None:
            self._clock = _clock_of(self._device)
        self._clock.begin()
        self._begin_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        assert self._clock is not None
        assert self._begin_ns is not None
        # the host's clock is read before anything here waits for the device
        host_ms = (time.perf_counter_ns() - self._begin_ns) / 1e6
        self._failed = True
        if error is not None:
            # After an error of the device every wait for it raises too, and would hide the first error.
            return False
        device_ms = self._clock.end_ms()
        self._failed = False
        self._reading = Reading(host_ms, host_ms if device_ms is None else device_ms, self._clock.on_device)
        return False

    @property
    def reading(self) -> Reading:
        """Both times as one frozen record.

        Raises:
            UsageError: The block has not ended, or it ended with an exception.
        """
        if self._reading is None:
            raise UsageError(
                "A stopwatch is read after its block has ended",
                given="a block that ended with an exception" if self._failed else "a block that has not ended",
                remedy="read `host_ms`, `device_ms` and `verdict` below the `with` block",
            )
        return self._reading

    @property
    def host_ms(self) -> float:
        """How long the block held the host, in milliseconds."""
        return self.reading.host_ms

    @property
    def device_ms(self) -> float:
        """From the start of the block to the end of all work that it gave to the device, in milliseconds."""
        return self.reading.device_ms

    @property
    def verdict(self) -> str:
        """What the two times mean, in words: above all, when `host_ms` is no measure of `device_ms`."""
        return self.reading.verdict

    def __str__(self) -> str:
        # printing must not raise: it happens in error handlers and debuggers
        return repr(self) if self._reading is None else self.verdict

    def __repr__(self) -> str:
        if self._reading is None:
            return "<Stopwatch, not read>"
        return f"<Stopwatch host_ms={self._reading.host_ms:.3f} device_ms={self._reading.device_ms:.3f}>"


def timed(device: str | torch.device | None = None) -> Stopwatch:
    """Measure how long a block holds the host and how long the device works for it, as two times.

    **It waits.** On CUDA the whole device is synchronized when the block begins, so that earlier work is not counted,
    and again when it ends, after the host's time has been read: the block may have used several streams, and
    nothing else covers all of them. So a stopwatch around each step of a training loop slows the loop down.

    `device_ms` is a span and no sum: from the moment at which the block began, with an idle device, to the end of
    the last work it queued, on whichever stream of that device. Moments in which the device waited for the host
    lie inside it. Where the device had finished before the host was back, it is the host's time, and the verdict
    says so; how much of that the device was busy, only a trace can say. Without CUDA it equals `host_ms`. It is too
    long by the tens of microseconds that the second synchronize takes to return.

    Other devices' work is not covered. Inside a strand of `weave` the stopwatch would measure both strands: put it
    around `weave`.

    Args:
        device: The device to watch, "cpu" or a CUDA device; None means the current CUDA device, or the CPU where
            there is none.

    Returns:
        A stopwatch for one `with` block, to be read after it. It has `host_ms`, `device_ms` and `verdict`, which is
        also its `str`.

    Raises:
        UsageError: The device is neither "cpu" nor a CUDA device that exists, a CUDA graph is being captured, the
            stopwatch was used before, or it is read inside the block.

    Source:
        PyTorch, "CUDA semantics", section "Asynchronous execution": times without a synchronize are not accurate;
        use events, or synchronize before each reading.
    """
    return Stopwatch(device=device)


class _HostClock:
    """There is no device besides the host."""

    on_device = False

    def begin(self) -> None: ...

    def end_ms(self) -> float | None:
        return None


class _CudaClock:
    """Two events on the device's current stream, each recorded when the whole device is idle."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        with torch.cuda.device(device):
            self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        # Not only to leave out earlier work: with work still queued on the current stream the event would come to
        # pass later than the block's own work on another stream, and the time would be too short.
        self._record(self._begin)

    def end_ms(self) -> float:
        self._record(self._end)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))

    def _record(self, event: torch.cuda.Event) -> None:
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "timed() waits for the device, which a capture of a CUDA graph forbids",
                given="a stream that is being captured",
                remedy="put the stopwatch around the replay of the graph",
            )
        torch.cuda.synchronize(self._device)
        event.record(torch.cuda.current_stream(self._device))


def _clock_of(device: str | torch.device | None) -> _DeviceClock:
    import torch

    if device is None:
        if not torch.cuda.is_available():
            return _HostClock()
        device = "cuda"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _no_such_device(device) from error
    if chosen.type == "cpu":
        return _HostClock()
    if chosen.type != "cuda" or not torch.cuda.is_available() or (chosen.index or 0) >= torch.cuda.device_count():
        raise _no_such_device(device)
    return _CudaClock(torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index))


def _no_such_device(device: object) -> UsageError:
    return UsageError(
        "timed() watches the CPU or a CUDA device of this machine",
        given=f"device={device!r}",
        remedy='leave `device` out, or give "cpu" or a device that torch.cuda.device_count() counts',
    )


def _in_words(milliseconds: float) -> str:
    """Write a time as a reader wants it: `3.3 ms`, `4,091 ms`."""
    if milliseconds < 1:
        return f"{milliseconds:.3f} ms"
    return f"{milliseconds:,.1f} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"
