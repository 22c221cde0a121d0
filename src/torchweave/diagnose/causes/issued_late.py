"""All of one side is launched before the other's next launch, and it is done by then.

One host thread launches depth first: while it fills one side's queue, the other side has nothing to run.
`backward()` returns only when all of it is launched, so a forward placed after it comes late as well.

**Evidence needed.** The next operation was not launched yet, while the running side's queue was deep, or
while its operations last longer than launching takes.

**Mend.** Launch by turns, or from two threads; `torchweave.weave` does it for a forward and a backward.

**Not proof of it.** A host that is slow on both sides: then the queues are empty (`launch_bound`).

**Source.** PyTorch notes, "Autograd mechanics"; measured on the project's own traces.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
torchweave.weave(forward, backward)   # two strands, by turns
# or launch in smaller portions, by turns:
for a, b in zip(parts_of_a, parts_of_b):
    with torch.cuda.stream(s1): a()
    with torch.cuda.stream(s2): b()
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return (
        f"{facts.moments} in which one side ran on from its queue and the other's next operation "
        f"({facts.get('pending_op')}) was not launched yet; it came up to {facts.longest} late."
    )
