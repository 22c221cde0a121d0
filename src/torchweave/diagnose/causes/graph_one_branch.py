"""A CUDA graph was captured without a fork.

Only streams that fork from, and join, the capturing stream become parallel branches of the graph.

**Evidence needed.** Both sides on one stream, and nearly all their operations launched by `cudaGraphLaunch`: the
capture decided on the branches. Kernels of one replay share one launch call.

**Mend.** Fork and join inside the capture.

**Not proof of it.** A graph on one stream: it may be meant so.

**Source.** CUDA Programming Guide, "Cross-stream dependencies and events" (stream capture).
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
with torch.cuda.graph(graph):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): b()
    a()
    torch.cuda.current_stream().wait_stream(side)
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"Both sides ran on stream {facts.get('pending_stream')}, {facts.get('first_ops')} and "
        f"{facts.get('second_ops')} operations, nearly all launched by replays of a CUDA graph."
    )
