"""Backward was called under another stream, and autograd launched it on the forward's.

Each backward operation runs on the stream that its forward operation ran on. `with torch.cuda.stream(s):
loss.backward()` moves only the first gradient to `s`; everything else stays.

**Evidence needed.** Backward work on the stream of the forward, and either the first node waiting for an event
(on the caller's own stream it would not) or the first gradient filled on another stream.

**Mend.** Run the *forward* of the microbatch under the stream that its backward shall run on, or use
`torchweave.weave`.

**Not proof of it.** Backward on one stream alone: that is the ordinary case.

**Source.** PyTorch notes, "Stream semantics of backward passes".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
# the chunk whose backward shall overlap runs its forward on its own stream
with torch.cuda.stream(side):
    loss = chunk(x)
...
with torch.cuda.stream(side):
    loss.backward()
# or, with no change to the chunks:
torchweave.weave(lambda: other(y), loss.backward)
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.get('second_ops')} backward operations ran on stream {facts.get('pending_stream')}, the "
        "forward's, although backward was called under another stream."
    )
