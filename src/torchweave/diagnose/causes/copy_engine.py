"""Copies of one direction share one engine.

A device has one copy engine for each direction as a rule: two uploads never overlap, whatever their streams.

**Evidence needed.** A copy that was issued and waited for no event while another of the same direction ran.

**Mend.** None in the program: the link is busy. Copy less, or earlier.

**Not proof of it.** Copies of opposite directions: those can overlap.

**Source.** CUDA Programming Guide, "Overlap of data transfer and kernel execution" (asyncEngineCount).
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = False
SEEN_IN = "trace"
MEND = """\
# put all uploads on one stream, in the order in which they are needed
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: {facts.get('pending_op')} on stream {facts.get('pending_stream')} waited "
        f"while a copy of the same direction ran on stream {facts.get('blocker_stream')}."
    )
