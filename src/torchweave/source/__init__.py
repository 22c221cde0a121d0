"""IDEA: what the code asks for. `ast` only; the script is never run."""

from torchweave.source.check import check_file, check_source
from torchweave.source.finding import Certainty, Finding

__all__ = ["Certainty", "Finding", "check_file", "check_source"]
