"""It overlapped, or there was nothing to overlap.

At most 15 % of the possible overlap was lost, so nothing is worth a finding.

**Evidence needed.** The numbers of the window.

**Mend.** Nothing to mend.

**Not proof of it.** Overlap alone does not prove speed: both sides can run slower beside each other
(`stretched`).

**Source.** The definition of the verdict.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = False
SEEN_IN = "trace"
MEND = """"""


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "At most 15 % of the possible overlap was lost."
