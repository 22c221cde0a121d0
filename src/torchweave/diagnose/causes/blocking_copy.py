"""A copy waits on the host.

`.cpu()`, `.to("cpu")` and `copy_` without `non_blocking=True` wait until the copy is done, and with it
everything before it on its stream.

**Evidence needed.** A synchronizing call inside `aten::copy_`, or a copy call that is synchronous by itself.

**Mend.** Copy to pinned memory made once, with `non_blocking=True`, on a stream of its own, and wait for an
event where the host needs it.

**Not proof of it.** A long copy call without a synchronization behind it: that is `pageable_copy`.

**Source.** CUDA runtime documentation, "API synchronization behavior"; PyTorch notes, "CUDA semantics,
asynchronous execution".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
host = torch.empty_like(x, device="cpu", pin_memory=True)   # once
host.copy_(x, non_blocking=True)
done = torch.cuda.Event(); done.record()
...
done.synchronize()     # only where the host reads it
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return f"{facts.moments}: the host waited in {facts.call} for a copy to end, {facts.median} each at the median."
