"""What standard output can show."""

from __future__ import annotations

import sys


def can_print(text: str) -> bool:
    """Return whether standard output's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
