"""What a trace cannot tell, and how to record one that can."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.calls import WAIT_EVENT, names_matching
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.trace.timeline import KERNEL

# The recorder's start and the first step; longer than this before the first work is worth a line.
_LONG_START_MS = 100.0


def not_known(window: Window, sides: Sides) -> tuple[str, ...]:
    """Return what the trace does not hold that the diagnosis could have used, as sentences."""
    checks = (_launches, _stacks, _waits, _grids, _start, _aliases, _environment)
    return tuple(text for check in checks if (text := check(window, sides)))


def _launches(window: Window, _: Sides) -> str:
    missing = int((window.work.call < 0).sum())
    if not missing:
        return ""
    return (
        f"The launch calls of {missing} of {len(window.work)} operations are not in the trace (launched before it "
        "began, or not recorded): record CPU activity too, and a few steps before the one that matters."
    )


def _stacks(window: Window, _: Sides) -> str:
    if len(window.timeline.frames) or window.timeline.log is not None or window.timeline.format != "kineto":
        return ""
    return "Which line of the program: no Python stacks were recorded. Record with `profile(with_stack=True)`."


def _waits(window: Window, _: Sides) -> str:
    timeline = window.timeline
    if len(timeline.waits) or not names_matching(timeline, WAIT_EVENT)[timeline.calls.name].any():
        return ""
    return (
        "Which stream waited for which event: only the calls were recorded. Record with "
        "`experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)`."
    )


def _grids(window: Window, _: Sides) -> str:
    kernels = window.work.kind == KERNEL
    if not kernels.any() or (window.work.blocks[kernels] >= 0).any():
        return ""
    return "Whether kernels filled the chip: the recorder did not write their grids."


def _start(window: Window, _: Sides) -> str:
    timeline = window.timeline
    host = np.concatenate((timeline.ops.begin, timeline.calls.begin))
    before = (window.begin - int(host.min(initial=window.begin))) / 1e6
    if before < _LONG_START_MS:
        return ""
    return f"The {before:.0f} ms of the host before the first device work (loading, warm-up) are outside the span."


def _aliases(window: Window, sides: Sides) -> str:
    """One stream worked though several were made to wait: two stream objects may be one CUDA stream."""
    waits = window.timeline.waits
    if len(window.lanes) > 1 or sides.two or len(waits) < 2:
        return ""
    return (
        f"Streams were made to wait {len(waits)} times, but only one stream worked: two stream objects may be the "
        "same CUDA stream (see `torchweave explain stream_alias`), or no work was put on the other."
    )


def _environment(window: Window, _: Sides) -> str:
    if window.timeline.log is not None:
        return ""
    if window.timeline.metadata.get("max_connections") or window.timeline.format != "kineto":
        return ""
    return "Environment variables (CUDA_DEVICE_MAX_CONNECTIONS, CUDA_LAUNCH_BLOCKING) are not in the trace."
