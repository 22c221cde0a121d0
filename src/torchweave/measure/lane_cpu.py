"""IDEA: a link without a GPU: a collective ends when its bytes can have come over, and waiting sleeps."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from torchweave.measure.c10d import POINT_TO_POINT, Call, num_bytes, raw_wait, raw_wait_callback, unboxed_work

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one collective did on a link. Times are `time.perf_counter_ns()`.

    Args:
        issue_ns: When the program started it.
        begin_ns: When the link was free for it.
        end_ns: When it had ended: really, and on the link.
        operation: Its name in the namespace `c10d`.
        num_bytes: How many bytes it moved on this rank.
    """

    issue_ns: int
    begin_ns: int
    end_ns: int
    operation: str
    num_bytes: int


@dataclass(slots=True)
class LinkLog:
    """What a link saw, in the order of the ends.

    Args:
        transfers: One entry for each collective that ended.
        waits: Begin and end of every time in which a thread waited for a collective, ns.
    """

    transfers: list[Transfer] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)

    def clear(self) -> None:
        """Forget everything so far."""
        self.transfers.clear()
        self.waits.clear()


class CpuLane:
    """One first-in-first-out link.

    A thread of the lane sleeps through each collective, so that its true end is known and its future completes even
    where nobody waits. Point-to-point operations have no such thread: a receive may wait long for its peer, and what
    was started after it must not wait with it.

    Args:
        ns_per_byte: How long the link takes for a byte; 0 delays nothing.
        log: Where transfers and waits are noted.
    """

    def __init__(self, ns_per_byte: float, log: LinkLog) -> None:
        self._ns_per_byte, self._log = ns_per_byte, log
        self._lock = threading.Lock()
        self._free_ns = 0
        self._queue: queue.SimpleQueue[tuple[_Pending, c10d.Work] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry, name="torchweave-link", daemon=True)
        self._thread.start()

    def carry(self, call: Call) -> object:
        """Run a call on its backend and return its result with a Work that ends no sooner than the link allows."""
        size = num_bytes(call.args)
        issue_ns = time.perf_counter_ns()
        with self._lock:
            begin_ns = max(issue_ns, self._free_ns)
            deadline_ns = self._free_ns = begin_ns + round(size * self._ns_per_byte)
        result = call.redispatch()
        real = unboxed_work(result)
        transfer = Transfer(issue_ns, begin_ns, deadline_ns, call.operation.name, size)
        pending = _Pending(real, transfer, self._log)
        work = c10d.PythonCallbackWork(pending)
        if call.operation.name not in POINT_TO_POINT:
            self._queue.put((pending, work))
        return call.replaced(result, work)

    def close(self, limit_s: float = 5.0) -> None:
        """Let what is under way end, and end the lane's thread; a collective that never ends is left behind."""
        self._queue.put(None)
        self._thread.join(limit_s)

    def _carry(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, work = item
            pending.land()
            # completes the future too; a failure is kept in it and raised again where the program waits
            with contextlib.suppress(Exception):
                raw_wait_callback(work)
            del item, pending, work


class _Pending:
    """A collective under way: the callback of its Work's `wait`.

    Its transfer's end is what the link allows; the true one is known when it has landed.
    """

    __slots__ = ("_claim", "_error", "_landed", "_log", "_real", "_transfer")

    def __init__(self, real: c10d.Work | None, transfer: Transfer, log: LinkLog) -> None:
        self._real, self._transfer, self._log = real, transfer, log
        # a backend's Work is waited for once: gloo's receives count their completions
        self._claim = threading.Lock()
        self._landed = threading.Event()
        self._error: Exception | None = None

    def __call__(self, timeout: timedelta) -> bool:
        begin_ns = time.perf_counter_ns()
        if self._landed.is_set() and begin_ns >= self._transfer.end_ns:
            return self._finish()
        try:
            if self._claim.acquire(blocking=False):
                self._land(timeout)
            elif not self._landed.wait(timeout.total_seconds() or None):
                raise RuntimeError(f"Timed out after {timeout}: {self._transfer.operation} over a simulated link")
            return self._finish()
        finally:
            self._log.waits.append((begin_ns, time.perf_counter_ns()))

    def land(self) -> None:
        """Wait for the backend, unless another thread does, and sleep until the link has carried the bytes."""
        if self._claim.acquire(blocking=False):
            self._land(timedelta())
        else:
            self._landed.wait()
        self._sleep()

    def _land(self, timeout: timedelta) -> None:
        try:
            if self._real is not None:
                raw_wait(self._real, timeout) if timeout else raw_wait(self._real)
        except Exception as error:
            self._error = error
        finally:
            self._real = None
            self._note(time.perf_counter_ns())
            self._landed.set()

    def _finish(self) -> bool:
        if self._error is not None:
            raise self._error
        self._sleep()
        return True

    def _sleep(self) -> None:
        left_ns = self._transfer.end_ns - time.perf_counter_ns()
        if left_ns > 0:
            time.sleep(left_ns * 1e-9)

    def _note(self, real_end_ns: int) -> None:
        planned = self._transfer
        end_ns = max(real_end_ns, planned.end_ns)
        self._log.transfers.append(
            Transfer(planned.issue_ns, planned.begin_ns, end_ns, planned.operation, planned.num_bytes)
        )
