"""Tests of watched runs; random inputs are the same in every run, and the builder of traces is that of tests/why."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent.parent / "why"))

settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")
