"""Long-lived rank processes for tests: torch is imported once, every job gets a process group of its own.

`pool.run(function, *args)` runs a top-level function on every rank and returns their results in the order of the ranks.
A rank that hangs or dies is killed and reported with where it stood; the next job gets fresh processes.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from multiprocessing import connection
from pathlib import Path

GROUP_TIMEOUT_S = 8.0
MEET_S = 30.0
# for a group that is broken, where its backend may not come to an end of it
TAKE_DOWN_S = 10.0


class RanksFailedError(AssertionError):
    """A job raised on some rank, hung, or left its process in another state; the text holds every rank's story."""


class Pool:
    """Rank processes of one world size, started at the first job.

    Args:
        num_ranks: World size.
        backend: `gloo`, or `nccl` with a device for each rank.
        environment: What the rank processes have in their environment beside this one's.
    """

    def __init__(self, num_ranks: int, backend: str = "gloo", environment: dict[str, str] | None = None) -> None:
        self.num_ranks, self._backend = num_ranks, backend
        self._environment = environment or {}
        self._context = multiprocessing.get_context("spawn")
        self._workers: list = []
        self._num_jobs = 0
        self._server = None
        self._folder = tempfile.TemporaryDirectory(prefix="torchweave-pool-")

    def run(self, function, *args, timeout=60.0, group_timeout_s=GROUP_TIMEOUT_S, breaks=False):
        """Run `function(*args)` on every rank, inside a fresh group; return the results by rank.

        Args:
            function: A top-level function; `dist.get_rank()` tells it which rank it is.
            args: Its arguments; picklable.
            timeout: Seconds until the job counts as hung.
            group_timeout_s: The process group's own timeout.
            breaks: Whether the job leaves a broken group behind. NCCL does not promise that such a one can be taken
                down; the processes answer before they try, and are replaced where they do not come to an end of it.
        """
        self._start()
        self._num_jobs += 1
        early = breaks and self._backend == "nccl"
        job = (self._num_jobs, self._server.port, self._backend, group_timeout_s, early, function, args)
        for worker in self._workers:
            worker.pipe.send(job)
        answers, trouble = self._collect(timeout)
        stories = [
            f"--- rank {rank} ---\n{answer[1]}"
            for rank, answer in enumerate(answers)
            if answer is not None and answer[0] != "done"
        ]
        if trouble or stories:
            # after a mere exception too: ranks that left a job at different points number their next groups differently
            self._kill()
            raise RanksFailedError("\n".join([trouble, *stories]).strip())
        if early and self._collect(TAKE_DOWN_S)[1]:
            self._kill()
        return [answer[1] for answer in answers]

    def close(self):
        """End all processes."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        for worker in self._workers:
            worker.process.join(3)
        self._kill()
        self._folder.cleanup()

    def _start(self):
        if self._workers:
            return
        if self._server is None:
            from torch.distributed import TCPStore

            # hosted here, so that it outlives a rank that is killed
            self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers = [
            _Worker(self._context, rank, self.num_ranks, self._folder.name, self._environment)
            for rank in range(self.num_ranks)
        ]

    def _kill(self):
        for worker in self._workers:
            worker.process.kill()
            worker.process.join(5)
            worker.pipe.close()
        self._workers = []

    def _collect(self, timeout):
        """Wait for every rank's answer; say what is wrong where one does not come."""
        answers: list = [None] * self.num_ranks
        end = time.monotonic() + timeout
        while (missing := [rank for rank, answer in enumerate(answers) if answer is None]) and time.monotonic() < end:
            pipes = {self._workers[rank].pipe: rank for rank in missing}
            for pipe in connection.wait(list(pipes), timeout=max(0.0, end - time.monotonic())):
                try:
                    answers[pipes[pipe]] = pipe.recv()
                except EOFError:
                    answers[pipes[pipe]] = ("died", f"the process died: exit code {self._exit_code(pipes[pipe])}")
        if missing:
            stacks = "\n".join(f"--- rank {rank} hangs at ---\n{self._workers[rank].stacks()}" for rank in missing)
            return answers, f"ranks {missing} did not end within {timeout:g} s\n{stacks}"
        if any(answer[0] in ("died", "dirty") for answer in answers):
            return answers, "a process died or is in a state that the next job must not see"
        return answers, ""

    def _exit_code(self, rank):
        process = self._workers[rank].process
        process.join(2)
        return process.exitcode


class _Worker:
    def __init__(self, context, rank, num_ranks, folder, environment):
        self.pipe, theirs = context.Pipe()
        self._stacks = Path(folder) / f"stacks-{num_ranks}-{rank}-{time.monotonic_ns()}"
        self.process = context.Process(
            target=_main,
            args=(theirs, rank, num_ranks, str(self._stacks), environment),
            name=f"rank {rank}",
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def stacks(self):
        """Ask where all threads of the process stand."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self._stacks.read_text() if self._stacks.exists() else "(not known: the process is still starting)"


def _main(pipe, rank, num_ranks, stacks, environment):
    """Run jobs until the pool closes."""
    os.environ.update(environment)
    file = Path(stacks).open("w")  # noqa: SIM115 - faulthandler writes to it for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch.distributed import ProcessGroup

    torch.set_num_threads(1)
    c10d = dict(vars(ProcessGroup))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        except BaseException:
            pipe.send(("failed", f"the job could not be read:\n{traceback.format_exc()}"))
            continue
        if job is None:
            return
        answer = _do(job, rank, num_ranks, pipe.send)
        for name, value in c10d.items():
            # whether Engine.close() does this itself is a unit test's business; here jobs are kept apart
            if name != "__dict__" and vars(ProcessGroup)[name] is not value:
                setattr(ProcessGroup, name, value)
        pipe.send(answer)


def _do(job, rank, num_ranks, send):
    """Run one job in a fresh group; say also whether it left the process as it was."""
    import torch
    import torch.distributed as dist

    from torchweave.engine import pair

    number, port, backend, group_timeout_s, early, function, args = job
    torch.set_num_threads(1)
    torch.manual_seed(number)
    before = state_of_process()
    try:
        store = dist.PrefixStore(f"job{number}", dist.TCPStore("127.0.0.1", port, is_master=False))
        join(store, rank, num_ranks, group_timeout_s, backend)
        answer = ("done", function(*args))
    except BaseException:
        answer = ("failed", traceback.format_exc())
    if early:
        send(answer)
    try:
        pair.engine().close()
        pair.engine.cache_clear()
        if dist.is_initialized():
            # what is broken is not waited for
            dist.distributed_c10d._abort_process_group() if early else dist.destroy_process_group()
        gc.collect()
    except BaseException:
        return ("dirty", f"{answer[1]}\nthen, while clearing up:\n{traceback.format_exc()}")
    if threads := threads_of_ours():
        return ("dirty", f"{answer[1]}\nthreads were left: {threads}")
    if (after := state_of_process()) != before:
        changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
        return ("dirty", f"{answer[1]}\nthe job left other state than it found (before, after): {changed}")
    return answer


def join(store, rank, num_ranks, group_timeout_s, backend="gloo"):
    """Make the default group; its timeout begins when it is there: to come together may take a busy machine longer."""
    import torch
    import torch.distributed as dist

    patience, device = datetime.timedelta(seconds=max(group_timeout_s, MEET_S)), None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=patience, device_id=device)
    if device is not None:
        # the first collectives of each form connect the devices
        x = torch.ones(num_ranks, device=device)
        dist.all_reduce(x)
        dist.all_to_all_single(torch.empty_like(x), x)
        torch.cuda.synchronize()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=group_timeout_s), dist.group.WORLD)


def threads_of_ours(patience_s=2.0):
    """Return the names of live threads of torchweave, after a short while in which they may end."""
    end = time.monotonic() + patience_s
    while (names := [t.name for t in threading.enumerate() if t.name.startswith("torchweave")]) and (
        time.monotonic() < end
    ):
        time.sleep(0.02)
    return names


def state_of_process():
    """Return what a job must leave as it found it."""
    import torch
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return {
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "function modes": len(_get_current_function_mode_stack()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "sdpa": (torch._C._get_math_sdp_enabled(), torch._C._get_flash_sdp_enabled()),
        "num threads": torch.get_num_threads(),
        "sigint": signal.getsignal(signal.SIGINT),
    }
