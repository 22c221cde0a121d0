"""The host synchronizes in a loop with streams.

`synchronize()` on the device, a stream or an event stops the host until the device is done, and nothing is launched
meanwhile. Streams can wait for each other without the host.

**Found.** `torch.cuda.synchronize()`, `stream.synchronize()` and `event.synchronize()` in a loop that uses side
streams.

**Not found.** What runs under a condition inside the loop, loops that read clocks or event times (there it is part of
measuring), and waits for copies to the host, which the host has to wait for before it reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweave.source.facts import Facts, HostWait
from torchweave.source.rules import Found, among_streams, certainty

MEND = """\
ready = side.record_event()                    # right after what is needed
torch.cuda.current_stream().wait_event(ready)  # the device waits, the host goes on
"""


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each synchronization."""
    for wait in facts.of(HostWait):
        if not wait.explicit or wait.idle or not among_streams(wait.place):
            continue
        if any(loop.awaited for loop in wait.place.loops):
            continue
        why = f"`{wait.how}` stops the host in a loop that uses streams, so that neither stream gets work meanwhile."
        yield Found(wait.place.node, why, MEND, certainty(wait.sure and wait.wide))
