"""Another Python thread held the interpreter.

Two Python threads launch by turns of the interpreter lock: one stands still while the other runs Python code.

**Evidence needed.** Two threads whose launches alternate, and gaps of one while the other launches. A trace
does not record the lock, so it is never more than `likely`.

**Mend.** Hand over at fixed points, or launch less often (larger operations, CUDA graphs).

**Not proof of it.** Two threads: with long kernels they do no harm.

**Source.** Python documentation, `sys.setswitchinterval`.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
torchweave.weave(forward, backward)   # hands over where a strand would wait
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments} in which the launching thread stood still while another thread launched, "
        f"{facts.longest} the longest; their launches alternate."
    )
