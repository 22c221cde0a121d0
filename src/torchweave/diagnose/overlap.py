"""The numbers of a window: span, busy, overlapped, possible, lost, idle; communication hidden and exposed."""

from __future__ import annotations

import numpy as np

from torchweave.diagnose.model import (
    FIRST_SIDE,
    SECOND_SIDE,
    Communication,
    Numbers,
    StreamNumbers,
    Verdict,
)
from torchweave.diagnose.sides import Sides
from torchweave.diagnose.window import Window
from torchweave.intervals import intersection, length

# at most this share of the possible overlap lost: overlapped; at least that share: serial
OVERLAPPED_SHARE, SERIAL_SHARE = 0.15, 0.85

_MS = 1e6


def stream_numbers(window: Window) -> tuple[StreamNumbers, ...]:
    """Return each stream's numbers."""
    span = window.end - window.begin
    result = []
    for row, (device, stream) in enumerate(window.lanes):
        mine = window.lane == row
        busy = length(window.busy(mine))
        result.append(StreamNumbers(device, stream, int(mine.sum()), busy / _MS, (span - busy) / _MS))
    return tuple(result)


def numbers(window: Window, sides: Sides, streams: tuple[StreamNumbers, ...]) -> Numbers:
    """Return the window's numbers.

    `lost_ms` is the lesser side's busy time while the other side was not running.
    """
    busy = length(window.busy())
    span = window.end - window.begin
    first = second = both = 0
    if sides.two:
        one, other = window.busy(sides.side == FIRST_SIDE), window.busy(sides.side == SECOND_SIDE)
        first, second, both = length(one), length(other), length(intersection(one, other))
    possible = min(first, second)
    return Numbers(
        span_ms=span / _MS,
        busy_ms=busy / _MS,
        # sums of rounded times can be a hair below zero
        overlapped_ms=max(0.0, sum(stream.busy_ms for stream in streams) - busy / _MS),
        possible_ms=possible / _MS,
        lost_ms=(possible - both) / _MS,
        idle_ms=(span - busy) / _MS,
        both_ms=both / _MS,
        first_ms=first / _MS,
        second_ms=second / _MS,
    )


def communication_numbers(window: Window, sides: Sides) -> Communication | None:
    """Return how much communication was hidden behind computation, None where there was none."""
    mask = sides.communication
    if not mask.any():
        return None
    total = hidden = 0
    # beside work of its own device: what another device does hides nothing
    for device in np.unique(window.work.device[mask]):
        here = window.work.device == device
        busy = window.busy(mask & here)
        total += length(busy)
        hidden += length(intersection(busy, window.busy(~mask & here)))
    return Communication(
        busy_ms=total / _MS,
        hidden_ms=hidden / _MS,
        exposed_ms=(total - hidden) / _MS,
        hidden_share=hidden / total if total else 0.0,
    )


def verdict(found: Numbers, sides: Sides) -> Verdict:
    """Return the verdict on a window's numbers."""
    if not sides.two or found.possible_ms <= 0:
        return "nothing_to_overlap"
    share = found.lost_ms / found.possible_ms
    if share <= OVERLAPPED_SHARE:
        return "overlapped"
    return "serial" if share >= SERIAL_SHARE else "partial"
