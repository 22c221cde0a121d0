"""Pinned memory is made in a loop that copies to the device.

Pinning locks pages, which takes milliseconds in which the host launches nothing.

**Found.** `.pin_memory()` or a factory with `pin_memory=True` in a loop that uses streams or launches device work.

**Not found.** Loops that set buffers up (what is put into an attribute or container), loops over the parts of a mapping
or model, comprehensions, and what runs under a condition inside the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweave.source.facts import Facts, Pinned
from torchweave.source.rules import Found

WHY = "Pinned memory is made in every turn of this loop, and the host launches nothing while pages are locked."

MEND = """\
host = torch.empty(largest_shape, pin_memory=True)    # once, before the loop
for batch in data:
    view = host[: len(batch)].copy_(batch)
    x = view.to("cuda", non_blocking=True)
"""


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each allocation."""
    for made in facts.of(Pinned):
        loop = made.place.loop
        if loop is None or loop.comprehension or loop.mapping or made.kept or made.place.guards:
            continue
        if loop.streams or (loop.launches - {made.place.node} and not made.is_held()):
            yield Found(made.place.node, WHY, MEND, "shown" if loop.streams else "likely")
