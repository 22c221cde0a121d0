"""`CUDA_DEVICE_MAX_CONNECTIONS` is set to 1, or too late.

It is the number of hardware queues. With 1, operations start in the order of issue over all streams. It is read when
the CUDA context is made.

**Found.** `os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]` set to `1` (*likely*: Megatron asks for it with tensor
parallelism on Hopper GPUs and older), and set to whatever value after a call that has made the context. `setdefault`,
`update` and `putenv` too.

**Not found.** Environments of other processes, and a context that another file has made.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweave.source.facts import EnvironmentSet, Facts
from torchweave.source.rules import Found

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

MEND = f"""\
os.environ["{VARIABLE}"] = "32"    # before the first CUDA call
import torch
"""


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each setting."""
    for setting in facts.of(EnvironmentSet):
        if setting.name != VARIABLE:
            continue
        if setting.context is not None:
            why = (
                f"`{VARIABLE}` is read when the CUDA context is made, which line {setting.context} has done, so "
                "setting it here changes nothing."
            )
            yield Found(setting.place.node, why, MEND)
        elif setting.value == "1":
            why = (
                "One connection makes the operations of all streams start in the order of their issue, so one can be "
                "stuck behind another stream's."
            )
            yield Found(setting.place.node, why, MEND, "likely")
