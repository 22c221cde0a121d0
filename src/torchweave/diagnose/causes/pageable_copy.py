"""An asynchronous copy from or to memory that is not pinned.

The driver stages such a copy through a buffer of its own, and the call returns only when that is done, in spite
of `non_blocking=True`.

**Evidence needed.** A copy whose name holds `Pageable`, and no synchronization behind its call.

**Mend.** Pin the memory once, and copy from there.

**Not proof of it.** A short upload: up to about 64 KiB the staging is done at once.

**Source.** CUDA runtime documentation, "API synchronization behavior"; PyTorch notes, "CUDA semantics,
asynchronous execution".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
host = torch.empty(shape, pin_memory=True)     # once, not in the loop
# or: DataLoader(..., pin_memory=True)
x = host.to("cuda", non_blocking=True)
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: {facts.call} held the host for {facts.median} each at the median, "
        f"copying memory that is not pinned ({facts.get('copy_name')})."
    )
