"""A kernel's module is loaded at its first launch.

Since CUDA 11.7 modules are loaded when a kernel is first used. Loading takes milliseconds, can wait for the
device, and holds a lock against other threads.

**Evidence needed.** A loading row inside an operator that launches a kernel for the first time; the whole time
in the operator up to that launch counts. Where a trace has no such rows, a first launch that takes far longer
than launches do is `likely`.

**Mend.** Run every shape once before it matters, or load everything at the start.

**Not proof of it.** A long first launch of the whole trace: that is the recorder.

**Source.** CUDA Programming Guide, "Lazy loading".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
step()                                 # once, with all shapes, before it matters
# or: CUDA_MODULE_LOADING=EAGER in the environment
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments} in operators that loaded a kernel's module at its first launch, "
        f"{facts.longest} the longest ({facts.get('where_op')})."
    )
