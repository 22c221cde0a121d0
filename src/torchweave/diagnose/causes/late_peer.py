"""The collective had started here, and another rank came late to it.

A collective's kernel waits, running, until every rank has come. Its length is then not its load.

**Evidence needed.** With the other ranks' traces: a rank whose part started later. With one rank alone,
`likely`: it lasted three times longer than the shortest of its like, or far longer than its bytes need.

**Mend.** Balance the ranks; give the waiting rank independent work meanwhile.

**Not proof of it.** A long collective: it may move many bytes.

**Source.** NCCL documentation, "Group calls"; measured on the project's own traces.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
# find the late rank: torchweave why FOLDER_OF_RANKS
# here: move work.wait() behind work that does not need the result
"""
# with the other ranks' traces the late one is known already
MEND_SHOWN = """\
# mend the late rank, which the end of this report names
# here: move work.wait() behind work that does not need the result
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: {facts.get('blocker')} ran for up to {facts.get('blocker_ms', 0):.3f} ms, of "
        f"which up to {facts.longest} before its peer came."
    )
