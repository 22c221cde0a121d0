"""Pinned memory is allocated in the loop.

Pinning maps and locks pages: it takes milliseconds, the host stands still, and freeing it can wait for the
device.

**Evidence needed.** Calls such as `cudaHostAlloc` between two launches.

**Mend.** Allocate pinned buffers once and reuse them.

**Not proof of it.** Pinning before the loop.

**Source.** CUDA Programming Guide, "Page-locked host memory" and "Implicit synchronization".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
host = torch.empty(largest_shape, pin_memory=True)   # once
view = host[:n]
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return f"{facts.moments}: {facts.call} held the host, {facts.median} each at the median."
