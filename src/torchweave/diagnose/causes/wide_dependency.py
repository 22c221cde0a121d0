"""A wait on more than was needed, or recorded later than needed.

`wait_stream` waits for everything that was queued so far, and a wait that is placed early holds everything
behind it. The operation that waits may need only a part of it.

**Evidence needed.** An event wait between the launch of the operation before it and its own, and a start just
after the end of an operation of another stream that was launched before that wait. `likely` unless the
recording names the event: a trace does not hold the data flow, so the dependency can be real.

**Mend.** Record the event right after the operation that is needed, and wait just before the one that needs it.

**Not proof of it.** A wait call alone: most waits are over before they matter.

**Source.** CUDA Programming Guide, "Events"; PyTorch, `torch.cuda.Stream.wait_stream`.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
ready = torch.cuda.Event()
with torch.cuda.stream(s1):
    x = producer(); ready.record()      # right after what is needed
    unrelated()
with torch.cuda.stream(s2):
    independent()
    ready.wait()                        # right before the need, instead of s2.wait_stream(s1)
    consumer(x)
# collectives: move work.wait() down to where the result is used
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: work on stream {facts.get('pending_stream')} waited for an event and started "
        f"when {facts.get('blocker')} on stream {facts.get('blocker_stream')} ended; {facts.longest} the "
        "longest."
    )
