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


class Worker:
    """One thread that runs one job at a time, started when the first job comes."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no job runs."""
        return self._idle.is_set()

    def start(self, job: Callable[[], None]) -> None:
        """Begin to run a job, which must not raise."""
        if self._thread is None:
            # daemon: a strand that never ends must not keep the process from ending after a second Ctrl-C
            thread = threading.Thread(target=self._main, name=NAME, daemon=True)
            thread.start()  # raises where the process may have no more threads
            self._thread = thread
        self._idle.clear()
        try:
            self._jobs.put(job)
        except BaseException:  # Ctrl-C: nobody would ever end a job that nobody began
            self._idle.set()
            raise

    def wait(self, limit_s: float) -> bool:
        """Wait until the job has ended, and say whether it has."""
        return self._idle.wait(limit_s)

    def retire(self, limit_s: float = 5.0) -> None:
        """End the thread; a job that still runs is left to itself and is its last."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if self._idle.is_set():
                thread.join(limit_s)
            # a thread that is stuck keeps the old queue; the next one gets its own
            self._jobs, self._idle = queue.SimpleQueue(), threading.Event()
            self._idle.set()

    def _main(self) -> None:
        jobs, idle = self._jobs, self._idle
        while (job := jobs.get()) is not None:
            try:
                job()
            finally:
                del job
                idle.set()
