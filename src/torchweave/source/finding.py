"""IDEA: what a rule says about a place in a file, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# the words of the diagnosis of traces: proven by what is visible, or what fits best
Certainty: TypeAlias = Literal["shown", "likely"]


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One finding.

    Attributes:
        file: The file, as it was given.
        line: Its line, from 1.
        column: Its column in characters, from 1.
        cause: The cause's name, as in `torchweave causes`.
        why: Why this costs overlap or is a race, in one sentence.
        mend: What to write instead, as code.
        certainty: `shown` where the code proves it, `likely` where something that the file does not show decides.
    """

    file: str
    line: int
    column: int
    cause: str
    why: str
    mend: str
    certainty: Certainty
