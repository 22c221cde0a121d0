"""Plans are tested with random numbers of ranks and microbatches, the same ones in every run."""

from hypothesis import settings

settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")
