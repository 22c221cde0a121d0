"""An asynchronous copy starts from memory that is not pinned.

The driver stages such a copy through a buffer of its own and the call returns only when that is done, in spite of
`non_blocking=True`.

**Found.** `.to("cuda", non_blocking=True)`, `.cuda(non_blocking=True)` and `target.copy_(source, non_blocking=True)`
from a tensor that the file shows to be made in ordinary host memory, or from a `DataLoader` of this file without
`pin_memory=True`.

**Not found.** Tensors from elsewhere, arrays of NumPy that go to a device that the file does not name, and small ones
(lists of numbers, literal sizes up to 64 KiB, and what is called `cu_seqlens`, `indices` or `offsets`, before
or after the copy), whose copy is staged at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchweave.source.facts import Facts, PageableUpload
from torchweave.source.rules import Found, certainty

# what is named so has one number for each sequence, and its copy is staged at once
_SMALL = re.compile(
    r"len|indptr|indices|idx|index|mask|pos|ids|num|count|offset|start|size|range|slot|step", re.IGNORECASE
)


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each upload."""
    for copy in facts.of(PageableUpload):
        if _SMALL.search(f"{copy.source} {copy.names}"):
            continue
        source = f"`{copy.source}`" if copy.source else "Its source"
        why = (
            f"{source} is not in pinned memory, so this copy holds the host until it is staged, in spite of "
            "`non_blocking=True`."
        )
        yield Found(copy.place.node, why, MEND, certainty(copy.sure))


MEND = """\
host = torch.empty(shape, pin_memory=True)    # once, not in the loop; or DataLoader(..., pin_memory=True)
x = host.to("cuda", non_blocking=True)
"""
