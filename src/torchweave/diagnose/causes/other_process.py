"""Another process has the device.

Without MPS, contexts of different processes take turns on a device: none overlaps another, and each seems to
stand still at times.

**Evidence needed.** A live run, which can ask the driver for the processes. A trace holds one process.

**Mend.** Use the device alone, or MPS.

**Not proof of it.** Unexplained gaps.

**Source.** CUDA Multi-Process Service documentation.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = False
SEEN_IN = "live run"
MEND = """\
nvidia-smi --query-compute-apps=pid,used_memory --format=csv
"""


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "Another process used the device."
