"""The ranks of one job, each with a recording: they meet in a folder, and nobody waits for ever.

The program's own process group is left alone: it may be gone, or broken, when the recordings are written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchweave.errors import UsageError
from torchweave.trace.recording import ENDING

LIMIT_S = 120.0
_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """This rank's place in its job.

    Attributes:
        rank: Global rank.
        world: Ranks of the job.
        expected: Ranks that can be seen from here: all with a common folder, else those of this host.
        folder: Where they meet.
        key: What tells this run of the job from another in the same folder.
        is_own: Whether the folder is ours, to be removed in the end.
    """

    rank: int
    world: int
    expected: tuple[int, ...]
    folder: Path
    key: str
    is_own: bool

    @property
    def is_first(self) -> bool:
        """Whether this rank gathers and reports."""
        return self.rank == self.expected[0]


def job_of(environment: Mapping[str, str], save: Path | None = None) -> Job | None:
    """Return this rank's job, as torchrun tells it.

    Args:
        environment: The process's variables.
        save: The folder that the user wants the recordings in; it has to be the same for all ranks.

    Returns:
        None where the process is no rank of several.

    Raises:
        UsageError: The folder cannot be made.
    """
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
    except (KeyError, ValueError):
        return None
    if world < 2 or not 0 <= rank < world:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    key = "-".join(environment.get(name, "") for name in names)
    expected = (
        tuple(range(world)) if save is not None else tuple(range(rank - local_rank, rank - local_rank + local_world))
    )
    if save is not None:
        return Job(rank, world, expected, _made(save), key, is_own=False)
    # ranks of one host have one launcher
    words = re.sub(r"[^A-Za-z0-9]+", "-", f"{key}-{os.getuid()}-{os.getppid()}")
    return Job(rank, world, expected, _made(Path(tempfile.gettempdir()) / f"torchweave-{words}"), key, is_own=True)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "Recordings of several ranks go to a folder",
            given=f"{folder}: {error.strerror or error}",
            remedy="give `--save` a folder that every rank can write to",
        ) from error
    if folder.stat().st_uid != os.getuid() and str(folder).startswith(tempfile.gettempdir()):
        raise UsageError("A folder for recordings has to be your own", given=str(folder), remedy="give `--save FOLDER`")
    return folder


def announce(job: Job) -> None:
    """Say that this rank is there; what an earlier run left under its name goes."""
    for path in (recording_path(job, job.rank), _path(job, job.rank, "failed")):
        path.unlink(missing_ok=True)
    alive = {"pid": os.getpid(), "host": socket.gethostname(), "key": job.key}
    _write(_path(job, job.rank, "alive"), json.dumps(alive))


def fail(job: Job, why: str) -> None:
    """Say that this rank will give no recording."""
    _write(_path(job, job.rank, "failed"), why)


def gather(job: Job, *, limit_s: float = LIMIT_S) -> tuple[dict[int, Path], dict[int, str]]:
    """Wait for the other ranks' recordings.

    Args:
        job: This rank's job.
        limit_s: How long to wait, s. A rank whose process is gone is not waited for.

    Returns:
        The recordings by rank, and for the other ranks why there is none.
    """
    found: dict[int, Path] = {}
    missing: dict[int, str] = {}
    until = time.monotonic() + limit_s
    while len(found) + len(missing) < len(job.expected):
        late = time.monotonic() > until
        for rank in job.expected:
            if rank in found or rank in missing:
                continue
            # looked at before the file: a process that ends has written it before
            gone = _gone(job, rank)
            if recording_path(job, rank).exists():
                found[rank] = recording_path(job, rank)
            elif (why := _read(_path(job, rank, "failed"))) is not None:
                missing[rank] = why
            elif gone:
                missing[rank] = gone
            elif late:
                missing[rank] = f"it did not come within {limit_s:g} s"
        if len(found) + len(missing) < len(job.expected):
            time.sleep(_PERIOD_S)
    return found, missing


def clean(job: Job) -> None:
    """Remove what only the gathering needed; the folder too, where it is ours."""
    for rank in job.expected:
        for ending in ("alive", "failed"):
            _path(job, rank, ending).unlink(missing_ok=True)
        if job.is_own:
            recording_path(job, rank).unlink(missing_ok=True)
    if job.is_own:
        # a rank that was not waited for may still write
        with contextlib.suppress(OSError):
            job.folder.rmdir()


def recording_path(job: Job, rank: int) -> Path:
    """Return where a rank's recording goes."""
    return job.folder / f"rank{rank}{ENDING}"


def _path(job: Job, rank: int, ending: str) -> Path:
    return job.folder / f"rank{rank}.{ending}"


def _gone(job: Job, rank: int) -> str:
    """Return why a rank will not come, empty where it may: its process on this host has ended."""
    text = _read(_path(job, rank, "alive"))
    if text is None:
        return ""
    try:
        alive = json.loads(text)
        pid, host, key = int(alive["pid"]), alive["host"], alive["key"]
    except (ValueError, KeyError, TypeError):
        return ""
    if host != socket.gethostname() or key != job.key:
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"its process ({pid}) ended without one"
    except PermissionError:
        return ""
    return f"its process ({pid}) ended without one" if _is_zombie(pid) else ""


def _is_zombie(pid: int) -> bool:
    """Return whether a process has ended and nobody has taken note."""
    # Source: Linux, proc(5): the state is the first letter behind the command in brackets
    return (_read(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].strip().startswith("Z")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
