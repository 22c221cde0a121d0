"""The causes: one module each, whose docstring is its page. `NAMES` fixes their names and the order of the list."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchweave.diagnose.words import duration
from torchweave.errors import UsageError

NAMES = (
    "none",
    "timed_without_sync",
    "launch_blocking",
    "same_stream",
    "backward_on_forward_stream",
    "stream_alias",
    "launch_bound",
    "launch_queue_full",
    "issued_late",
    "host_sync",
    "explicit_sync",
    "blocking_copy",
    "pageable_copy",
    "pinned_alloc",
    "device_alloc",
    "lazy_load",
    "host_busy",
    "gil",
    "wide_dependency",
    "backward_join",
    "accumulate_grad_stream",
    "legacy_default_stream",
    "max_connections",
    "comm_order",
    "late_peer",
    "sm_full",
    "copy_engine",
    "stretched",
    "graph_one_branch",
    "nothing_to_overlap",
    "no_such_call",
    "missing_wait",
    "other_process",
    "unknown",
)

CODE = {name: code for code, name in enumerate(NAMES)}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a cause's evidence is written from.

    Attributes:
        lost_ms: Lost overlap charged to it.
        idle_ms: Idle time charged to it.
        count: Moments charged.
        calls: Names of the calls behind it, with how often, the most frequent first.
        median_us: Median length of those calls, us.
        values: Other numbers and names of this trace, by the cause's own keys.
    """

    lost_ms: float
    idle_ms: float
    count: int
    calls: tuple[tuple[str, int], ...] = ()
    median_us: float = 0.0
    values: dict[str, Any] | None = None

    def get(self, key: str, default: Any = "?") -> Any:
        """Return one of the other values."""
        return (self.values or {}).get(key, default)

    @property
    def moments(self) -> str:
        """How many moments were charged, in words."""
        return "1 moment" if self.count == 1 else f"{self.count} moments"

    @property
    def longest(self) -> str:
        """The longest moment, in words."""
        return f"{self.get('longest_ms', 0.0):.3f} ms"

    @property
    def median(self) -> str:
        """The median length of the calls behind it, in words."""
        return duration(self.median_us, digits=0)

    @property
    def call(self) -> str:
        """The calls in words: `12 x cudaStreamSynchronize`."""
        return ", ".join(f"{count} x {name}" for name, count in self.calls[:3]) or "no recorded call"


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause.

    Attributes:
        name: Its fixed name.
        line: What it is, in one line.
        page: Its page, Markdown.
        recoverable: Whether the program can mend it.
        seen_in: `trace`, or where else it can be seen (`live run`, `source`).
        mend: What to do, with code.
        evidence: Writes the evidence from the facts.
        mend_shown: The mend where the cause is shown, if that is another.
    """

    name: str
    line: str
    page: str
    recoverable: bool
    seen_in: str
    mend: str
    evidence: Callable[[Facts], str]
    mend_shown: str = ""


def cause(name: str) -> Cause:
    """Return one cause by its name.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in CODE:
        close = difflib.get_close_matches(name, NAMES, n=1)
        meant = f"did you mean `{close[0]}`? " if close else ""
        remedy = f"{meant}`torchweave causes` lists them all"
        raise UsageError("A cause has to be one of the list", given=f"`{name}`", remedy=remedy)
    module = import_module(f"torchweave.diagnose.causes.{name}")
    page = (module.__doc__ or "").strip()
    return Cause(
        name=name,
        line=page.splitlines()[0],
        page=page,
        recoverable=module.RECOVERABLE,
        seen_in=module.SEEN_IN,
        mend=module.MEND,
        evidence=module.evidence,
        mend_shown=getattr(module, "MEND_SHOWN", ""),
    )


def all_causes() -> tuple[Cause, ...]:
    """Return all causes in the order of the list."""
    return tuple(cause(name) for name in NAMES)
