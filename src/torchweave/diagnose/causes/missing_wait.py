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


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "A wait that the data flow needs is not there."
