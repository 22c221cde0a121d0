"""`CUDA_LAUNCH_BLOCKING` is set: every launch waits for its kernel, or the setting comes too late.

**Found.** `os.environ["CUDA_LAUNCH_BLOCKING"] = "1"` (and `setdefault`, `update`, `putenv`), and any setting after a
call that has made the CUDA context, when it is read.

**Not found.** Environments of other processes; `"0"` before the context; functions, and conditions around the setting,
that are named after debugging, profiling or determinism: there somebody asks for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchweave.source.facts import EnvironmentSet, Facts
from torchweave.source.rules import Found

# a function or switch of this name is asked for what it does
_ON_PURPOSE = re.compile("determin|debug|reproduc|profil|blocking|trace|sanit|verbose", re.IGNORECASE)

VARIABLE = "CUDA_LAUNCH_BLOCKING"


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
            yield Found(setting.place.node, why, f"# export {VARIABLE}=... for the whole process, before it starts\n")
        elif setting.value not in (None, "", "0") and not _is_asked_for(setting):
            why = "Each launch waits for its kernel to end, so nothing overlaps; it is for debugging."
            yield Found(setting.place.node, why, f'os.environ.pop("{VARIABLE}", None)    # remove this line\n')


def _is_asked_for(setting: EnvironmentSet) -> bool:
    """Return whether the function, or a condition around the setting, is named after what it is good for."""
    place = setting.place
    return any(_ON_PURPOSE.search(text) for text in (place.function, *map(ast.unparse, place.guards)))
