"""About 1,000 operations waited on one stream, and the host was stuck there.

A stream takes about 1,022 operations; the next launch call blocks until one has ended. A host that launches all
of one side first cannot get to the other side meanwhile.

**Evidence needed.** About a thousand operations issued and not ended on the running side, or `Command Buffer
Full` rows.

**Mend.** Launch the two sides by turns, in smaller portions.

**Not proof of it.** Slow launch calls with few operations outstanding.

**Source.** Measured: 1,021 and 1,022 outstanding on an H200 and in public traces.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
for a, b in zip(parts_of_a, parts_of_b):    # by turns
    with torch.cuda.stream(s1): a()
    with torch.cuda.stream(s2): b()
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"Up to {facts.get('queue')} operations of the running side were issued and not ended while the host "
        f"went on launching them; the other side's next operation waited {facts.longest} at most."
    )
