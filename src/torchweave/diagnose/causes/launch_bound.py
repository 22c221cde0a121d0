"""Kernels are shorter than the host takes to launch them.

An operator costs the host tens of microseconds. Where its kernel is shorter, the queue is always empty, nothing
can overlap, and the device idles between kernels.

**Evidence needed.** Time in which the launching thread was in operators, launch calls or short Python between
them, while the queue of the running side was nearly empty or nothing ran; and the operations launched around it
last no more than twice as long as they were launched apart.

**Mend.** Fewer and larger operations: fuse, batch, capture a CUDA graph, or compile.

**Not proof of it.** The first operation of a stream, where the others are long: it was launched late
(`issued_late`). A slow launch call: with about 1,000 operations outstanding it blocks because the device is
well fed (`launch_queue_full`).

**Source.** Measured on the project's own traces; CUDA Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts
from torchweave.diagnose.words import duration

RECOVERABLE = True
SEEN_IN = "trace"
_SOON_US = 50
MEND = """\
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):     # capture both streams, forked and joined inside
    step()
graph.replay()
# or: step = torch.compile(step, mode="reduce-overhead")
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    # one that something else held up as well says nothing about launching
    lead = facts.get("lead_us", 0)
    started = f", started {duration(lead)} after their launch calls" if lead <= _SOON_US else ""
    return (
        f"Operations of {duration(facts.get('kernel_us', 0))} at the median, launched "
        f"{duration(facts.get('interval_us', 0))} apart{started}: the queues were empty in {facts.moments}."
    )
