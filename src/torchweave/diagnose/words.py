"""How lengths of time are told: microseconds while they are short, else milliseconds, as everywhere in a report."""

from __future__ import annotations

_SHORT_US = 100.0


def duration(microseconds: float, digits: int = 1) -> str:
    """Return a length of time in words.

    Args:
        microseconds: The length.
        digits: Of a short one, behind the point.
    """
    if abs(microseconds) < _SHORT_US:
        return f"{microseconds + 0.0:.{digits}f} us"
    return f"{microseconds / 1e3:.3f} ms"
