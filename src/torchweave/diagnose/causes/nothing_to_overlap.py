"""The dependencies leave no room.

Nothing of the other side was left, or everything depends on what runs.

**Evidence needed.** No moment in which one side ran and the other still had an operation to come.

**Mend.** None: use another schedule, or more independent work.

**Not proof of it.** Lost overlap: that needs a cause of its own.

**Source.** The definition of possible overlap.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = False
SEEN_IN = "trace"
MEND = """"""


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "No moment was left in which both sides had work."
