"""Gradients accumulate on an old stream.

The node that accumulates a parameter's gradient keeps the stream that it was made under. If the graph was made,
or DDP built, under another stream, accumulation goes there and waits are added.

**Evidence needed.** A live run, which sees the node's stream; PyTorch 2.10 and later warn. A trace shows
`AccumulateGrad` kernels on a third stream, with waits.

**Mend.** Build the graph and DDP under the stream that trains.

**Not proof of it.** Accumulation on the main stream.

**Source.** PyTorch, `torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch`.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "live run"
MEND = """\
with torch.cuda.stream(training_stream):
    model = DistributedDataParallel(module)
"""


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "Gradients accumulated on a stream that is not the one that computes them."
