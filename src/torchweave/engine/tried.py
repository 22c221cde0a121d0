"""IDEA: what has run on CPUs alone so far stays off where CUDA is in use, until it has been measured there.

That is: `auto` measuring (it takes `turns`), weight gradients that wait, and turns given away at `.tolist()`.
"""

from __future__ import annotations

import torch

ON_CUDA = False


def may_run_here() -> bool:
    """Whether what is new may run in this process."""
    return ON_CUDA or not torch.cuda.is_initialized()
