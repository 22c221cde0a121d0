"""Gradients accumulate on an old stream.

The node that accumulates a parameter's gradient keeps the stream that it was made under. If the graph was made,
or DDP built, under another stream, accumulation goes there and waits are added.

**Evidence needed.** An event wait before or behind an `AccumulateGrad` kernel on a stream that is not where
backward mainly works: `likely`. A live run sees the node's stream, and PyTorch 2.10 and later warn.

**Mend.** Build the graph and DDP under the stream that trains.

**Not proof of it.** Accumulation on the main stream.

**Source.** PyTorch, `torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch`.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
with torch.cuda.stream(training_stream):
    model = DistributedDataParallel(module)
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: {facts.get('pending_op')} on stream {facts.get('pending_stream')} waited for "
        f"{facts.get('blocker')} on stream {facts.get('blocker_stream')}, and one of the two accumulates gradients; "
        f"{facts.longest} the longest."
    )
