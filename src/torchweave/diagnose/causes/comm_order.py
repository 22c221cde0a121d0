"""Collectives of one communicator wait for each other.

A communicator has one stream: a short collective that is needed now stands behind a long one that is not.

**Evidence needed.** An awaited collective that was issued, and started only when a longer one of the same
communicator had ended.

**Mend.** Change the order of issue, or give the urgent ones a process group of their own.

**Not proof of it.** Two collectives back to back, neither awaited.

**Source.** NCCL documentation, "Communicators"; PyTorch, `torch.distributed.new_group`.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
urgent = dist.new_group()                  # once, on all ranks
dist.all_gather_into_tensor(out, x, group=urgent, async_op=True)
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: the awaited collective stood behind {facts.get('blocker')} on stream "
        f"{facts.get('blocker_stream')}; {facts.longest} the longest."
    )
