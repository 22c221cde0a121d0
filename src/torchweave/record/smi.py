"""What the driver's own tool says, where it is installed: nothing else knows of other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

_LIMIT_S = 10.0


def query(what: str, fields: Sequence[str]) -> list[list[str]] | None:
    """Ask nvidia-smi.

    Args:
        what: `gpu` or `compute-apps`.
        fields: What to tell of each.

    Returns:
        A row for each, None where the tool is missing, fails, or does not answer in time.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = [tool, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == len(fields)]


def other_processes() -> list[str]:
    """Return the processes, other than this one, that have one of the devices this one can see."""
    rows = query("compute-apps", ("pid", "gpu_uuid", "process_name", "used_memory")) or []
    own = {os.getpid(), *_family()}
    return [f"{name} (pid {pid}, {memory} MiB)" for pid, _, name, memory in rows if int_or(pid) not in own]


def _family() -> set[int]:
    """Return the processes of the same job on this host: ranks of one launcher are no strangers."""
    parent = os.getppid()
    try:
        found = subprocess.run(  # noqa: S603
            ["/bin/ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {int(word) for word in found.stdout.split() if word.isdigit()}


def int_or(text: str, default: int = -1) -> int:
    """Return a number, or the default for what is none."""
    return int(text) if text.isdigit() else default
