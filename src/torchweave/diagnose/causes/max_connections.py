"""Several streams share one hardware queue.

CUDA_DEVICE_MAX_CONNECTIONS (8 by default, 1 in many launch scripts) is the number of hardware queues. Streams
that share one run in the order of issue: an operation starts only after the one issued before it has started.

**Evidence needed.** An operation that was issued long before, waited for no event, had room, and started within
10 us after the *start* of the operation issued before it on another stream. `likely`: traces do not record the
variable.

**Mend.** Set the variable higher before the process first uses the device, or issue the streams by turns.

**Not proof of it.** A start after another operation's *end*.

**Source.** CUDA Programming Guide, "Environment variables"; CUDA C++ Best Practices Guide.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
export CUDA_DEVICE_MAX_CONNECTIONS=32    # the most there are; before the first CUDA call
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: work on stream {facts.get('pending_stream')} was issued up to "
        f"{facts.longest} earlier, waited for no event, had room, and started just after the start of the "
        f"operation issued before it, on stream {facts.get('blocker_stream')}."
    )
