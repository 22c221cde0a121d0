"""IDEA: start the ranks of one machine, each with the environment that torchrun would give it, and watch over them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from torchweave.errors import TorchweaveError

LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
# glibc gives a new thread a heap of its own and returns large blocks to the system: then what runs on a worker thread
# pays for fresh pages again and again, and every timing measures that too. One heap that keeps its pages, for all.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_GRACE_S = 5.0
_EXIT_USAGE = 2  # with which a rank refuses its options, as the command line does


def is_launched() -> bool:
    """Return whether this process has its rank already, from torchrun or from `start_ranks`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(
    words: Sequence[str],
    ranks: int,
    *,
    limit_s: float,
    passes: Sequence[int] = (0,),
    program: Sequence[str] = ("-m", "torchweave"),
) -> int:
    """Run a Python program with the same words on every rank and wait for all of them.

    Args:
        words: The command line after the program's name.
        ranks: How many processes.
        limit_s: When the whole run is given up.
        passes: Exit codes with which a rank has run to its end.
        program: What Python runs: `-m` and a module, or a script.

    Returns:
        The highest exit code of the ranks; that of a usage error, where a rank has told one.

    Raises:
        TorchweaveError: A rank died, or the time is over; the other ranks are stopped then.
    """
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            # the words are this program's own, checked by its parser
            processes.append(
                subprocess.Popen([sys.executable, *program, *words], env=_environment(rank, ranks, port))  # noqa: S603
            )
        if _watch(processes, limit_s, passes) == _EXIT_USAGE:
            return _EXIT_USAGE
    finally:
        _stop(processes)
    return max(process.returncode for process in processes)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    # what torchrun tells the ranks that it started, this process among them, is not true of others
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return {
        **kept,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # the ranks share the cores
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **{name: os.environ.get(name, value) for name, value in _ALLOCATOR.items()},
    }


def _watch(processes: Sequence[subprocess.Popen[bytes]], limit_s: float, passes: Sequence[int]) -> int:
    """Wait until every rank has ended well, or one has refused its options; raise at the first that has failed."""
    end = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code == _EXIT_USAGE:
                return code
            if code is not None and code not in passes:
                how = f"exit code {code}" if code > 0 else f"signal {-code}"
                raise TorchweaveError(
                    "Every rank runs to its end",
                    given=f"rank {rank} of {len(processes)} ended with {how}",
                    remedy="its own message stands above; the other ranks were stopped",
                )
        if None not in codes:
            return 0
        if time.monotonic() > end:
            late = [str(rank) for rank, code in enumerate(codes) if code is None]
            raise TorchweaveError(
                f"The ranks end within {limit_s:g} s",
                given=f"rank {', '.join(late)} still ran",
                remedy="take a smaller model, fewer steps, or a faster link",
            )
        time.sleep(_POLL_S)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: first kindly, then not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port
