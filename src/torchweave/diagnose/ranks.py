"""Several traces at once: unrelated files, or the ranks of one job with their clocks aligned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.errors import UnreadableInputError
from torchweave.trace.read import read


@dataclass(frozen=True, slots=True)
class Found:
    """The diagnoses of several files.

    Attributes:
        diagnoses: One a readable file, in the order given.
        errors: Why the other files could not be read.
        differences: What differs between the ranks of one job, as sentences.
    """

    diagnoses: tuple[Diagnosis, ...]
    errors: tuple[UnreadableInputError, ...] = ()
    differences: tuple[str, ...] = ()


def diagnose_files(
    files: Sequence[Path],
    *,
    between: Sequence[str] | None = None,
    window_ms: tuple[float, float] | None = None,
    range_name: str | None = None,
    one_job: bool = False,
) -> Found:
    """Diagnose files, one after another.

    Args:
        files: The traces.
        between: See `diagnose`.
        window_ms: See `diagnose`.
        range_name: See `diagnose`.
        one_job: They are ranks of one job: what waited for whom is looked up in the others.
    """
    diagnoses, errors = [], []
    for file in files:
        try:
            timeline = read(file)
        except UnreadableInputError as error:
            errors.append(error)
            continue
        diagnoses.append(diagnose(timeline, between=between, window_ms=window_ms, range_name=range_name))
    return Found(tuple(diagnoses), tuple(errors))
