"""IDEA: one rank's failure becomes every rank's error, naming the same rank, stage, action and microbatch.

The rank that fails says so in the store, and then breaks the pipeline's connections. Whoever waits for it is woken by
that, reads the note, and breaks its own. A rank that was killed leaves no note: its closed connection is the sign, and
who waited for it says what was missed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchweave.errors import PipelineError, WaitLimitError
from torchweave.pipeline.connections import close_connections, mark
from torchweave.schedule.action import Action

# a rank that is alive answers within the first, and says who is not within the second
_GRACE_S = 1.0
_PATIENCE_S = 4.0
# the store is asked so often whether another rank has failed
_POLL_S = 0.02
# at each step's end a GPU is waited for so: what it ends later than it is looked at is lost to every step
_LONGEST_PAUSE_S = 0.001
# so often a rank looks for other ranks' failures while its host may be blocked by its GPU
_LOOKOUT_S = 1.0
_KEY = "failed"


class Where(NamedTuple):
    """What a rank does or is to do.

    Attributes:
        rank: Global rank.
        stage: The stage, or None outside of the schedule's actions.
        action: The action, as the plan writes it.
        microbatch: The microbatch, or None.
    """

    rank: int
    stage: int | None
    action: str
    microbatch: int | None

    @classmethod
    def of(cls, rank: int, action: Action) -> Where:
        """Return the place of an action on a rank."""
        return cls(rank, action.stage, str(action), action.microbatch)

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank}"


class Guard:
    """Watches over one pipeline on this rank.

    Args:
        group: The pipeline's own group.
        store: A store that the pipeline's ranks share, for this pipeline alone; None for a pipeline of one rank.
        limit_s: How long anything is waited for, seconds.
        device: Where the tensors are: with NCCL a wait holds a GPU, and not the host.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, store: Store | None, limit_s: float, device: torch.device
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.limit_s = limit_s
        self._group, self._store = group, store
        self._device, self._on_gpu = device, device.type == "cuda"
        self._others: list[dist.ProcessGroup] = []
        self._note: str | None = None
        self._breaks = threading.Lock()

    def watch(self, group: dist.ProcessGroup) -> None:
        """Break this group too where the pipeline fails."""
        self._others.append(group)

    @contextlib.contextmanager
    def lookout(self) -> Iterator[None]:
        """Look for other ranks' failures from another thread: a GPU that waits for such a rank may block the host.

        With gloo whoever waits is woken by the connection that is closed.

        Raises:
            PipelineError: Another rank's failure was found, of which this rank's host has noticed nothing.
        """
        if not self._on_gpu or self._store is None:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._look_out, args=(over,), name="torchweave lookout", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_PATIENCE_S)
        self.check()

    def _look_out(self, over: threading.Event) -> None:
        while not over.wait(_LOOKOUT_S):
            if (note := self._read()) is not None:
                self._adopt(note)  # what the GPU waits for ends with the connections; the host then finds the note
                return

    def check(self) -> None:
        """Raise where the pipeline failed before.

        Raises:
            PipelineError: The failure.
        """
        if self._note is not None:
            raise _error(self._note)

    @contextlib.contextmanager
    def at(self, where: Where) -> Iterator[None]:
        """Make whatever is raised inside this rank's failure at that place.

        Raises:
            PipelineError: Something was raised; another rank's failure passes as it is.
        """
        try:
            yield
        except PipelineError:
            raise
        except BaseException as error:
            failure = self.fail(where, f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
            if not isinstance(error, Exception):
                raise  # Ctrl-C and the like stay what they are, on this rank
            raise failure from error

    def fail(self, where: Where, cause: str) -> PipelineError:
        """Tell every rank of a failure, and return the error to raise: an earlier failure's, where there was one."""
        with self._breaks:
            if self._note is None:
                note = json.dumps([where, cause])
                self._note = self._write(note) or note
                self._break()
            return _error(self._note)

    @contextlib.contextmanager
    def on_break(self, awaited: Where | None = None) -> Iterator[None]:
        """Make a backend's error inside the failure behind it.

        Args:
            awaited: What another rank does meanwhile; None for a collective of them all.

        Raises:
            PipelineError: A rank is gone, or did nothing within the limit.
        """
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self.behind(error, awaited, time.monotonic() - begin) from error

    def wait(self, work: dist.Work, awaited: Where | None, *, on_host: bool = False) -> None:
        """Wait for a transfer on the host, or with NCCL on the current stream alone.

        Args:
            work: The transfer.
            awaited: What another rank does meanwhile; None for a collective of them all.
            on_host: Wait on the host with NCCL, too, and look for other ranks' failures.

        Raises:
            PipelineError: A rank failed, or did nothing within the limit.

        Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `WorkNCCL::isCompleted` and `WorkNCCL::wait`.
        """
        with self.on_break(awaited):
            work.wait() if self._on_gpu else work.wait(datetime.timedelta(seconds=self.limit_s))
        if on_host and self._on_gpu:
            self._wait_for_gpu(work, awaited)

    def _wait_for_gpu(self, work: dist.Work, awaited: Where | None) -> None:
        """Wait on the host for a transfer that the current stream waits for already.

        Not by the transfer's own word: one over a simulated link never says that it is complete, and one of NCCL's
        says so where NCCL has found an error, too.
        """
        is_reached = mark(self._device)

        def has_ended() -> bool:
            return is_reached() or isinstance(work.exception(), RuntimeError)

        self.wait_on_host(has_ended, awaited)
        if isinstance(error := work.exception(), RuntimeError):
            raise self.behind(error, awaited)

    def wait_on_host(self, is_done: Callable[[], bool], awaited: Where | None) -> None:
        """Wait until something has happened that nothing wakes this rank for, and look for other ranks' failures.

        Args:
            is_done: Says whether it has.
            awaited: Who is waited for, for the error.

        Raises:
            PipelineError: A rank failed, or the limit is over.
        """
        end, pause, look_at = time.monotonic() + self.limit_s, 0.0002, 0.0
        while not is_done():
            if (now := time.monotonic()) >= look_at:
                look_at = now + _POLL_S
                if (note := self._read()) is not None:
                    raise self._adopt(note)
                if now > end:
                    where = awaited or Where(self.rank, None, "the end of the step", None)
                    raise self.fail(where, self._silence(awaited))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def behind(self, error: RuntimeError, awaited: Where | None, waited_s: float = 0.0) -> PipelineError:
        """Return the failure behind a transfer's error: another rank's note, or else a rank that is gone or silent.

        Args:
            error: What the backend raised.
            awaited: What another rank was to do.
            waited_s: For how long it was waited for, seconds.
        """
        if waited_s >= 0.9 * self.limit_s:
            note = self._read()
            where = awaited or Where(self.rank, None, "the end of the step", None)
            return self._adopt(note) if note is not None else self.fail(where, self._silence(awaited))
        note, gone = self._look_around(awaited)
        if note is not None:
            return self._adopt(note)
        where = awaited or Where(gone, None, "the end of the step", None)
        told = " ".join(str(error).split())[:200]
        return self.fail(where, f"its process is gone, as rank {self.rank} noticed ({told})")

    def _look_around(self, awaited: Where | None) -> tuple[str | None, int]:
        """Wait for a failure's note, as long as whoever closed the connection may be a victim, too.

        A rank whose connection was closed says that it is here, so that its own closing is not taken for its end.

        Returns:
            The note, or None where the awaited rank, or any, does not answer; and the rank that does not.
        """
        if self._store is None or self._group is None:
            return None, self.rank
        suspects = [awaited.rank] if awaited is not None else dist.get_process_group_ranks(self._group)
        begin = time.monotonic()
        silent = list(suspects)
        with contextlib.suppress(RuntimeError):  # the store is gone: reading it says so
            self._store.set(f"here/{self.rank}", "")
            while (waited_s := time.monotonic() - begin) < _PATIENCE_S:
                if (note := self._read()) is not None:
                    return note, self.rank
                silent = [rank for rank in suspects if not self._store.check([f"here/{rank}"])]
                if silent and waited_s > _GRACE_S:
                    break
                time.sleep(_POLL_S)
        return self._read(), silent[0] if silent else suspects[0]

    def _silence(self, awaited: Where | None) -> str:
        what = "the other ranks" if awaited is None else str(awaited)
        return str(WaitLimitError(f"rank {self.rank}", what, self.limit_s).rule)

    def _adopt(self, note: str) -> PipelineError:
        with self._breaks:
            if self._note is None:
                self._note = note
                self._break()
            return _error(self._note)

    def _write(self, note: str) -> str | None:
        """Leave a note in the store, unless there is one; return the one that is there."""
        if self._store is None:
            return None
        try:
            return bytes(self._store.compare_set(_KEY, "", note)).decode()
        except RuntimeError:
            return None  # the store's host is gone: the others notice that themselves

    def _read(self) -> str | None:
        if self._store is None:
            return None
        try:
            return bytes(self._store.get(_KEY)).decode() if self._store.check([_KEY]) else None
        except RuntimeError as error:
            # the ranks cannot agree any more; by default it is rank 0's process, so that all of them say the same
            told = " ".join(str(error).split())[:200]
            return json.dumps(
                [Where(0, None, "hosting the store", None), f"the store is gone with its process ({told})"]
            )

    def _break(self) -> None:
        """Close the pipeline's connections, so that whoever waits for this rank is woken."""
        for group in (self._group, *self._others):
            if group is not None:
                close_connections(group, on_gpu=self._on_gpu)


def _error(note: str) -> PipelineError:
    (rank, stage, action, microbatch), cause = json.loads(note)
    return PipelineError(rank=rank, stage=stage, action=action, microbatch=microbatch, cause=cause)
