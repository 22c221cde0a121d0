"""Whether an operation had room beside a running one: blocks, registers, shared memory and threads of a chip."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.window import Window
from torchweave.trace.timeline import KERNEL, Flags, Ints

# Registers are handed out to warps in units of 256, shared memory to blocks in units of 1 KiB with 1 KiB of the
# system's own (compute capability 8 and 9; CUDA Programming Guide, "Compute Capabilities").
_REGISTER_UNIT = 256
_SYSTEM_SHARED_BYTES = 1024
_MOST_BLOCKS_PER_SM = 32


def no_room(window: Window, running: Ints, ready: Ints) -> Flags:
    """Return whether the running kernel left no room for a single block of the ready one.

    Args:
        window: The work.
        running: Running operations, rows of the window's work, -1 for none.
        ready: Ready operations, rows of the window's work.
    """
    work, devices = window.work, window.timeline.devices
    result = np.zeros(len(ready), dtype=np.bool_)
    kernels = (running >= 0) & (work.kind[np.maximum(running, 0)] == KERNEL) & (work.kind[ready] == KERNEL)
    for ordinal in np.unique(work.device[ready[kernels]]) if kernels.any() else []:
        device = devices.get(int(ordinal))
        if device is None or device.num_sms <= 0 or device.threads_per_sm <= 0:
            continue
        rows = np.flatnonzero(kernels & (work.device[ready] == ordinal))
        limits = np.array([device.threads_per_sm, device.registers_per_sm, device.shared_bytes_per_sm, 0])
        limits[3] = _MOST_BLOCKS_PER_SM
        limits = np.where(limits > 0, limits, np.iinfo(np.int64).max // 4)
        need = _needs(window, running[rows], device.warp_size)
        want = _needs(window, ready[rows], device.warp_size)
        most = (limits // np.maximum(need, 1)).min(axis=1)
        blocks = work.blocks[running[rows]]
        # blocks spread evenly: as many on each multiprocessor as fit, and none is left empty
        resident = np.minimum(most, -(-blocks // device.num_sms))
        left = limits - resident[:, None] * need
        known = (blocks > 0) & (work.threads[running[rows]] > 0) & (work.threads[ready[rows]] > 0)
        # blocks of a later kernel are not handed out while an earlier one has blocks left to hand out
        waves = blocks > most * device.num_sms
        result[rows] = known & (waves | (blocks >= device.num_sms) & (left < want).any(axis=1))
    return result


def _needs(window: Window, rows: Ints, warp: int) -> Ints:
    """Return what one block of each kernel needs: threads, registers, shared memory, one slot."""
    work = window.work
    threads = np.maximum(work.threads[rows], 1)
    warps = -(-threads // warp)
    registers = np.maximum(work.registers[rows], 0) * warp
    per_warp = -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT
    shared = np.maximum(work.shared_bytes[rows], 0) + _SYSTEM_SHARED_BYTES
    return np.column_stack((warps * warp, warps * per_warp, shared, np.ones(len(rows), dtype=np.int64)))
