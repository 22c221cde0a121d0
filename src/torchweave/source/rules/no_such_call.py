"""Torch does not have what is called.

Answers on the web, and language models, name functions such as `torch.cuda.async_copy_to_device` that never existed.

**Found.** Calls of names that `torch.cuda` does not have in any version (*likely* where the name is not one of the
known inventions), of methods that `torch.cuda.Stream` and `torch.cuda.Event` do not have,
`stream=` given to operations,
`torch.cuda.Stream(non_blocking=...)`, and `torch.cuda.synchronize(stream)`, which takes a device.

**Not found.** Private names, and names that the file asks for with `hasattr` or `getattr`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweave.source.facts import Facts, NoSuchCall
from torchweave.source.rules import Found, certainty


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each call."""
    for call in facts.of(NoSuchCall):
        mend = call.instead or "# see https://docs.pytorch.org/docs/stable/cuda.html for what there is"
        yield Found(call.place.node, call.why, mend + "\n", certainty(call.sure))
