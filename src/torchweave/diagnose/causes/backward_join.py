"""The stream that called `backward()` waits for all of it at its end.

When backward has launched everything, autograd makes the stream that was current at the call wait for every
stream that backward used. What is put on that stream next waits for the whole backward.

**Evidence needed.** A wait asked for by autograd's thread within 20 us of its last node, and an operation held
by it.

**Mend.** Call `backward()` under the stream of its own microbatch.

**Not proof of it.** Any wait inside backward: nodes of different streams wait for one another too.

**Source.** PyTorch notes, "Stream semantics of backward passes".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
with torch.cuda.stream(stream_of_this_microbatch):
    loss.backward()
with torch.cuda.stream(stream_of_the_next):
    out = forward(x)
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: autograd made stream {facts.get('pending_stream')} wait for the end of "
        f"backward, and {facts.get('pending_op')} stood behind that wait for {facts.longest} at most."
    )
