"""One side's kernels leave no room on the chip.

A kernel with at least one full wave of blocks holds all registers, shared memory or thread slots; another
stream's blocks start only in its tail.

**Evidence needed.** The running kernel's resident blocks, from registers, shared memory and block size, leave
no place for one block of the ready kernel on any multiprocessor.

**Mend.** No program can make room that is not there; what helps is less at once: smaller tiles, fewer blocks
for the side that may be slow, priorities for the one that may not.

**Not proof of it.** The trace's "est. achieved occupancy", which can be 0.

**Source.** CUDA Programming Guide, "Hardware multithreading" and "Compute capabilities".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = False
SEEN_IN = "trace"
MEND = """\
# order instead of overlap: a high-priority stream gets the next free places
urgent = torch.cuda.Stream(priority=-1)
# communication: NCCL_MAX_CTAS limits the blocks it takes
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: {facts.get('blocker')} ({facts.get('blocks')} blocks of "
        f"{facts.get('threads')} threads on {facts.get('sms')} multiprocessors) left no room for a block of "
        f"{facts.get('pending_op')}."
    )
