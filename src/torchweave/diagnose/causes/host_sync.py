"""An operator has to wait for the device: `item`, masks, `nonzero`.

An operator whose result the host needs (a number, a shape) copies it and waits for everything before it on its
stream. Meanwhile the host launches nothing, and the queues run dry.

**Evidence needed.** A synchronizing call inside an operator that is no copy.

**Mend.** Keep values on the device; read them later, from pinned memory, when an event says that they are
there.

**Not proof of it.** A long wait while the queues of both sides are full: harmless, and not charged.

**Source.** CUDA runtime documentation, "API synchronization behavior"; PyTorch notes, "CUDA semantics,
asynchronous execution".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
total += loss.detach()                       # stays on the device
# x[mask] -> torch.where(mask, x, 0);  if t.any(): -> torch.where
# read once, at the end or a step late:
host.copy_(total, non_blocking=True)         # host: pinned, made once
done = torch.cuda.Event(); done.record()     # host holds it when done.query() says so
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: the host waited for the device in {facts.get('where_op')} ({facts.call}), "
        f"{facts.median} each at the median."
    )
