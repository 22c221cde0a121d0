"""The null stream orders itself with blocking streams.

Work on the legacy default stream waits for all earlier work of blocking streams, and they wait for it.
PyTorch's own streams are non-blocking and exempt; streams made by `cudaStreamCreate`, by other libraries or
taken over as external streams are not.

**Evidence needed.** Starts within 15 us after the end of an operation across the default stream's border, in
nearly all changes between the two, with no wait calls and room on the chip.

**Mend.** Use PyTorch's streams, or make the other one with `cudaStreamNonBlocking`.

**Not proof of it.** Work on the default stream as such.

**Source.** CUDA runtime documentation, "Stream synchronization behavior".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
side = torch.cuda.Stream()            # non-blocking
# in C++: cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), or compile with
# --default-stream per-thread
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: work on stream {facts.get('pending_stream')} was issued, waited for no event "
        f"and started right after the end of work on stream {facts.get('blocker_stream')}; one of the two is "
        "the default stream."
    )
