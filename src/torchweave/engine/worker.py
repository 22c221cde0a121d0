"""IDEA: the thread that runs backward strands, kept from pair to pair where that matters.

cuDNN and cuBLAS keep their execution plans and handles per thread. On a fresh thread the first attention backward of
every pair would build its plan again (49 ms on an H200, torch 2.11), so with CUDA the thread is kept while all goes
well. Without CUDA, and after a failure, it ends with its pair.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

NAME = "torchweave-backward"


class _Job:
    """A call that is made once, or never: by who claims it first.

    Locks alone, and no `threading.Event`: that is left locked where Ctrl-C comes inside of it.
    """

    __slots__ = ("_claim", "_ended", "is_over", "run")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run
        self._claim, self._ended = threading.Lock(), threading.Lock()
        self._ended.acquire()
        self.is_over = False

    def claim(self) -> bool:
        """Whether it is the caller's from now on."""
        return self._claim.acquire(blocking=False)

    def end(self) -> None:
        """Let go of the call, and of whoever waits for its end."""
        self.run, self.is_over = None, True
        self._ended.release()

    def wait(self, limit_s: float) -> bool:
        """Wait for its end, and say whether it has come."""
        if not self.is_over:
            self._ended.acquire(timeout=limit_s)
        return self.is_over


class Worker:
    """One thread that runs one job at a time, started when the first job comes."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no job runs, or will."""
        return self._job is None or self._job.is_over

    def start(self, run: Callable[[], None]) -> None:
        """Begin to run a job, which must not raise.

        Raises:
            BaseException: Ctrl-C, or the process may have no more threads. Then the job runs, or never will: `is_idle`.
        """
        job = self._job = _Job(run)
        try:
            if self._thread is None:
                # It is given its queue: one that has not begun yet when it is retired must not take the next one's.
                # daemon: a strand that never ends must not keep the process from ending after a second Ctrl-C
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name=NAME, daemon=True)
                self._thread.start()
            self._jobs.put(job)
        except BaseException:
            if job.claim():
                job.end()
            raise

    def wait(self, limit_s: float) -> bool:
        """Wait until the job has ended, and say whether it has."""
        return self._job is None or self._job.wait(limit_s)

    def retire(self, limit_s: float = 5.0) -> None:
        """End the thread; a job that still runs is left to itself and is its last."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if self.is_idle and thread.is_alive():
                thread.join(limit_s)
            # a thread that is stuck keeps the old queue; the next one gets its own
            self._jobs, self._job = queue.SimpleQueue(), None


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        if job.claim():
            try:
                if job.run is not None:
                    job.run()
            finally:
                job.end()
        del job
