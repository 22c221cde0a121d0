"""The host was doing something else, and the queues ran dry.

Input, logging, garbage collection, Python: while the launching thread does other things, the device works off
its queue and then stops.

**Evidence needed.** A gap of at least 1 ms on the launching thread without operator or call, while no other
thread launches. Only the part in which work was lost or the device idle is charged.

**Mend.** Move the work to another thread or process, or launch further ahead.

**Not proof of it.** A long gap while the queues are full: harmless, and not charged.

**Source.** Measured on the project's own traces.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
loader = DataLoader(dataset, num_workers=4, pin_memory=True)   # input beside the loop
# garbage: gc.disable(), and gc.collect() between steps
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return f"{facts.moments} in which the launching thread was in no operator and no call, {facts.longest} the longest."
