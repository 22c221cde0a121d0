"""None of the causes can be shown.

Launch calls that were not recorded, the recorder's own costs, gaps of up to 15 us that are the device's own,
and everything that no rule explains.

**Evidence needed.** None: it is what is left.

**Mend.** Record more: stacks, all threads, event waits.

**Not proof of it.** Any cause.

**Source.** The rules of blame.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = False
SEEN_IN = "trace"
MEND = """\
from torch._C._profiler import _ExperimentalConfig
profile(with_stack=True, experimental_config=_ExperimentalConfig(
    profile_all_threads=True, enable_cuda_sync_events=True))
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments} that no rule explains: the recorder's own time, gaps of up to 15 us, launches "
        f"that were not recorded; {facts.longest} the longest."
    )
