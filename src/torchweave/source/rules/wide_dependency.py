"""An asynchronous collective is waited for at once.

`async_op=True` lets computation run beside the collective only if some is launched before `wait()`.

**Found.** `wait()` on the handle of a collective with `async_op=True`, as the next thing that is done, or on the call
itself.

**Not found.** Files that communicate by `gloo` and never name CUDA, waits after anything else was launched or called,
several collectives that are waited for together, waits under a side stream, and `wait(timeout)`, which is there for
the limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweave.source.facts import AwaitedAtOnce, Facts
from torchweave.source.rules import Found


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each wait."""
    for wait in () if facts.on_cpu else facts.of(AwaitedAtOnce):
        why = (
            f"`{wait.call}` of line {wait.collective} is asynchronous and waited for before anything else is launched, "
            "so nothing runs beside it."
        )
        yield Found(wait.place.node, why, _mend(wait.call))


def _mend(call: str) -> str:
    return (
        f"work = dist.{call}(..., async_op=True)\n"
        "y = independent(x)      # what does not need the result\n"
        "work.wait()             # where the result is used\n"
    )
