"""IDEA: a strand whose host reads numbers from a device gives its turn away while they come.

Real models ask the device how many rows go where (`.tolist()` of split sizes): the host then waits until the device has
done all that was queued before, and cannot queue the other strand's work meanwhile. So the copy and an event are
queued, the other strand goes on, and only then the host waits, for that event alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from torchweave.errors import WaitLimitError

# methods of a tensor that read all of it; not `.item()`: programs log with it, on some ranks and not on others
READS = ("tolist",)
_POLL_S = 20e-6


def blocks(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor makes the host wait for a device."""
    return tensor.is_cuda


def begin_read(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool]]:
    """Queue a copy to the host.

    Args:
        tensor: On a device.

    Returns:
        Where its numbers will be, and a function that returns whether they are there.
    """
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    target.copy_(tensor.detach(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return target, event.query


def finish_read(is_there: Callable[[], bool], limit_s: float, strand: str) -> None:
    """Wait until the numbers are there.

    Args:
        is_there: As `begin_read` returned it.
        limit_s: How long to wait, seconds.
        strand: Whose host waits, for the error.

    Raises:
        WaitLimitError: The device did not come to the copy.
    """
    end = time.monotonic() + limit_s
    while not is_there():
        if time.monotonic() > end:
            raise WaitLimitError(f"the {strand} strand", "the device to copy what it reads", limit_s)
        time.sleep(_POLL_S)
