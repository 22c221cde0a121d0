"""A call that torch does not have.

The source asks for a function or an argument that does not exist, so the feature was never on.

**Evidence needed.** The source.

**Mend.** Use the call that exists.

**Not proof of it.** A trace: it shows only what ran.

**Source.** PyTorch documentation.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "source"
MEND = """\
x = pinned.to("cuda", non_blocking=True)    # instead of torch.cuda.async_copy_to_device(x)
"""


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "The source calls a function that torch does not have."
