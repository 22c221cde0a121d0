"""The work never was on two streams.

Operations of one stream run in the order of their launch. Two kinds of work on one stream cannot overlap,
whatever else is mended.

**Evidence needed.** Both sides on one (device, stream) pair, or an operation that stood behind one of the other
side on its own stream.

**Mend.** Give one side a stream of its own, and make it wait only for what it needs: before the
first part is launched, else it waits for that too.

**Not proof of it.** Few stream numbers in a trace: two stream objects can share one CUDA stream
(`stream_alias`).

**Source.** CUDA Programming Guide, "Streams"; PyTorch notes, "CUDA streams".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
side = torch.cuda.Stream()               # made once, not in the loop
side.wait_stream(torch.cuda.current_stream())   # before first_part(), which it does not need
with torch.cuda.stream(side):
    second_part()
first_part()
# collectives: dist.all_reduce(x, async_op=True), and work.wait() only where x is needed
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"Both sides ran on stream {facts.get('pending_stream')}: {facts.get('first_ops')} operations of "
        f"{facts.get('first')} and {facts.get('second_ops')} of {facts.get('second')}."
    )
