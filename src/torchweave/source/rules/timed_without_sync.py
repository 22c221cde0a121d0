"""A host clock is read before the device is done.

Calls that launch work return before it has run. The difference of two readings of `time.time()`, `perf_counter()`,
`monotonic()` or `timeit` is then the time of the launches, however long the work takes.

**Found.** Device work between two readings whose difference is taken, and between its last launch and the second
reading nothing that waits for it: no `synchronize()` of the device, stream or event, no `.item()`, `.cpu()` or other
operator that waits. Helper functions, methods, context managers and lambdas of the same file are looked through.

**Not found.** Calls into other files, unless they are a module's call: they may wait. A wait in one branch counts as a
wait. What is launched after work between the readings was waited for, which may be next to nothing. Branches whose test
says that no CUDA device is used (`if use_cuda: ... else: ...`). A difference that is named after the host's time
(`launch_s`, `host_ms`, `enqueue_time`), or whose function is, is meant so. `torch.utils.benchmark` and
`torchweave.timed` wait by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchweave.source.facts import ClockPair, Facts
from torchweave.source.rules import Found, certainty

# what somebody names so is meant to be the host's time
_ON_PURPOSE = re.compile(
    r"issue|launch|enqueue|submit|dispatch|host|cpu|wall|compil|load|init|build|setup|prepar", re.IGNORECASE
)

_OF_THE_HOST = re.compile(r"host|launch|enqueue|(^|_)(cpu|wall)(_|$)", re.IGNORECASE)

MEND = """\
with torchweave.timed() as t:    # reads the host's time and the device's
    step()
print(t.device_ms)
# or, before each reading of the clock:
torch.cuda.synchronize()
"""


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each second reading."""
    for pair in facts.of(ClockPair):
        if _ON_PURPOSE.search(pair.label) or _OF_THE_HOST.search(pair.place.function):
            continue
        why = (
            f"This clock reading comes when the device work launched on line {pair.launch} has only been enqueued, so "
            f"the time since line {pair.first} is that of the launches."
        )
        yield Found(pair.place.node, why, MEND, certainty(pair.sure))
