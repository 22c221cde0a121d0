"""Every launch waits for its kernel: CUDA_LAUNCH_BLOCKING=1.

With this variable, or under a debugger that serializes, each launch call returns only when its kernel has
ended, so no two kernels can ever run at once.

**Evidence needed.** Launch calls that last until the end of kernels longer than 20 us, for nearly all of them.

**Mend.** Unset the variable; it must be gone before the process first uses the device.

**Not proof of it.** A slow launch call alone: a full queue, a first launch and the recorder make launches slow
without waiting for the kernel.

**Source.** PyTorch notes, "CUDA semantics, asynchronous execution"; CUDA Programming Guide, "Environment
variables".
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
unset CUDA_LAUNCH_BLOCKING
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments}: the launch calls ({facts.call}) lasted until their kernels had ended, "
        f"{facts.median} each at the median."
    )
