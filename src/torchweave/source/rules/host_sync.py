"""An operator in a loop with streams makes the host wait for the device.

While the host waits it launches nothing, so the other stream runs dry.

**Found.** In a loop that uses side streams: `.item()`, `.tolist()`, `.cpu()`, `.to("cpu")`, `.numpy()`, `.nonzero()`,
`masked_select`, `unique`, indexing by a boolean mask, `print` and formatting of a tensor, `float()` and `int()` of a
tensor, `if tensor`. (`torchweave why` calls the copies among them `blocking_copy`.)

**Not found.** What runs under a condition inside the loop (`if step % 100 == 0`), loops without streams, tensors on the
CPU, and values that the file does not show to be tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweave.source.facts import Facts, HostWait
from torchweave.source.rules import Found, among_streams, certainty

MEND = """\
total += loss.detach()                       # keep it on the device, read it once after the loop
y = torch.where(mask, x, 0)                  # instead of x[mask]
host.copy_(x, non_blocking=True); copied.record()   # pinned; read it when `copied` is done
"""


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each operator that waits."""
    for wait in facts.of(HostWait):
        if wait.explicit or not among_streams(wait.place):
            continue
        why = (
            f"{_sentence(wait.how)} makes the host wait for the device in a loop that uses streams, so that it "
            "launches nothing meanwhile."
        )
        yield Found(wait.place.node, why, MEND, certainty(wait.sure))


def _sentence(how: str) -> str:
    return f"`{how}`" if how.endswith(")") and " " not in how else how[:1].upper() + how[1:]
