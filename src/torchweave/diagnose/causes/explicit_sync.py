"""`synchronize()` on a device, a stream or an event.

The host waits until the device, a stream or an event is done, and launches nothing meanwhile.

**Evidence needed.** A synchronizing call outside all operators. Only the part in which work was lost or the
device idle is charged.

**Mend.** Leave it out where the host reads nothing. Where one stream needs a result of the other, let it wait for
that on the device, and for no more: waiting for the whole stream keeps the two apart as well.

**Not proof of it.** A synchronize at the end of the window: nothing comes after it, and nothing is charged.

**Source.** CUDA runtime documentation, "API synchronization behavior"; PyTorch notes, "CUDA semantics,
asynchronous execution".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
# nothing is needed: no wait at all. A result of s1 is needed on s2:
ready = s1.record_event()      # right after what is needed
s2.wait_event(ready)           # right before the need; the host goes on
# for timing: torch.cuda.Event(enable_timing=True), and one synchronize at the end
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return f"{facts.moments}: the host stood in {facts.call}, {facts.median} each at the median, and launched nothing."
