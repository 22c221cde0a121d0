"""Host clocks were read around work that had only been enqueued.

Calls that launch work return before it has run. A host clock read after them measures the launching, not the
work.

**Evidence needed.** A live run: the two clock reads, and the device still working after the second. A trace
alone shows at most that a clock function lies in the recorded Python frames.

**Mend.** Time with `torchweave.timed`, or with events, or synchronize before each read.

**Not proof of it.** A short host time: small work is short too.

**Source.** PyTorch notes, "CUDA semantics, asynchronous execution".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "live run or the source"
MEND = """\
with torchweave.timed() as t:   # device time, honestly
    step()
print(t)
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    readings = facts.get("readings", 1)
    text = (
        f"A host clock was read at {facts.get('first')} and again at {facts.get('second')}, {facts.get('measured')} "
        f"later; the work launched between the two ran on for {facts.get('ran_on')} after that."
    )
    return text + (f" {readings} readings are like that; this is the worst." if readings != 1 else "")
