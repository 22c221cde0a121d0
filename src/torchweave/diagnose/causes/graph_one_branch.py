"""A CUDA graph was captured without a fork.

Only streams that fork from, and join, the capturing stream become parallel branches of the graph.

**Evidence needed.** A live run, which sees the capture. Kernels of one replay share one launch call, so a trace
lacks their launches.

**Mend.** Fork and join inside the capture.

**Not proof of it.** A graph on one stream: it may be meant so.

**Source.** CUDA Programming Guide, "Cross-stream dependencies and events" (stream capture).
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "live run"
MEND = """\
with torch.cuda.graph(graph):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): b()
    a()
    torch.cuda.current_stream().wait_stream(side)
"""


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "The replayed graph has one branch."
