"""The allocator's cache is emptied in a loop.

`torch.cuda.empty_cache()` waits for the device and gives its memory back, so the next turn has to allocate with
`cudaMalloc` again.

**Found.** `empty_cache()` in every turn of a loop that launches device work itself.

**Not found.** Loops that read clocks or call what does by its name (`do_bench`, `timeit`, `profile_...`), as benchmarks
of several cases do, functions that are named so, loops over the parts of a mapping or model, what runs under a
condition inside the loop or after an error, and loops whose work is in an inner loop or in other functions: once an
epoch is no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchweave.source.facts import CacheEmptied, Facts
from torchweave.source.rules import Found, certainty

_MEASURES = re.compile(r"(^|_)(bench\w*|profile|measure|tune|autotune)(_|$)", re.IGNORECASE)

MEND = """\
for batch in data:
    step(batch)
torch.cuda.empty_cache()    # after the loop, if another process needs the memory
"""


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each call."""
    for call in facts.of(CacheEmptied):
        loop = call.place.loop
        if _MEASURES.search(call.place.function):
            continue
        if loop is None or loop.mapping or loop.measured or call.place.guards or not (loop.launches or loop.streams):
            continue
        why = (
            "Every turn of this loop waits for the device, gives the cached memory back, and has to allocate it again "
            "with `cudaMalloc`."
        )
        yield Found(call.place.node, why, MEND, certainty(loop.streams))
