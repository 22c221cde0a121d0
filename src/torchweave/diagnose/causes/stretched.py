"""It overlapped, but both sides ran slower.

Two kernels at once share memory bandwidth, multiprocessors and power. The same kernel takes longer beside
another than alone.

**Evidence needed.** The same kernel name and grid, at least three times alone and three times beside the other
side, in one trace. It costs no overlap, so it is a remark of the report and never charged.

**Mend.** None in general; overlap work that needs different resources.

**Not proof of it.** A long kernel.

**Source.** Measured; NCCL issue reports of matrix products beside collectives.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = False
SEEN_IN = "trace"
MEND = """"""


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "The same kernels took longer beside the other side than alone."
