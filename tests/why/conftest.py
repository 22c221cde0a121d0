"""Random inputs are the same in every run: a failure can be run again."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")
