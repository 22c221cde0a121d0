"""A wait is absent, or waits on itself: the overlap is a race.

`s.wait_stream(torch.cuda.current_stream())` inside `with torch.cuda.stream(s)` waits on itself, and protects
nothing. It overlaps too well.

**Evidence needed.** The source, or a live run that knows which memory is written and read. A trace does not
hold the data flow.

**Mend.** Take the outer stream before entering the context.

**Not proof of it.** Overlap: it is wanted.

**Source.** PyTorch notes, "CUDA streams"; `torch.cuda._sanitizer`.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "live run or the source"
MEND = """\
outer = torch.cuda.current_stream()
with torch.cuda.stream(side):
    side.wait_stream(outer)
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    text = f"{facts.get('earlier')}; {facts.get('later')}, the same memory, and nothing orders the two."
    if facts.get("own_wait", ""):
        text += f" The wait at {facts.get('own_wait')} is a stream's wait for itself: it orders nothing."
    if facts.get("freed", False):
        text += " The memory was freed and given out again in between: `record_stream`, or a later wait, keeps it."
    pairs = facts.get("pairs", 1)
    return text + (f" {pairs} pairs of lines are like that." if pairs != 1 else "")
