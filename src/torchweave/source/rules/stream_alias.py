"""Streams are made in a loop, and the 33rd is the first again.

PyTorch hands streams out from a pool of 32 for each device and priority, round robin. Streams made anew in every turn
sooner or later are the CUDA stream that other work is on, and serialize with it.

**Found.** `torch.cuda.Stream()` in every turn of a loop, in this file's functions that the loop calls too; and lists
of visibly more than 32.

**Not found.** Loops of at most 32 turns, lists of unknown length, one stream for each device or part of a model, and
streams to capture CUDA graphs on.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweave.source.facts import Facts, StreamMade
from torchweave.source.rules import Found

POOL = 32

MEND = """\
side = torch.cuda.Stream()    # once, before the loop
for batch in data:
    with torch.cuda.stream(side):
        ...
"""


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each stream that is made in a loop."""
    for made in facts.of(StreamMade):
        loops = made.place.loops
        if not loops or made.of_device or made.place.depth - loops[-1].depth > 1:
            continue
        counts = [loop.count for loop in loops]
        known = [count for count in counts if count is not None]
        number = 1
        for count in known:
            number *= count
        # one for each item, or for each part of a model: how many these are, the file does not say
        comprehension = any(loop.comprehension or loop.mapping for loop in loops)
        here = made.place.depth == loops[-1].depth and not any(loop.display for loop in loops)
        if number > POOL and len(known) == len(counts) and here:
            why = f"{number} streams are made here and the pool has {POOL}, so some of them are the same CUDA stream."
            yield Found(made.place.node, why, MEND, "shown")
        elif len(known) < len(counts) and not (comprehension or made.kept or made.for_capture or made.place.guards):
            why = (
                f"A stream is made in every turn and the pool has {POOL}, so after {POOL} turns it is a CUDA stream "
                "that other work is on."
            )
            yield Found(made.place.node, why, MEND, "likely")
