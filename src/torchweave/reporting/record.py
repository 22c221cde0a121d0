"""A diagnosis as the JSON that is fixed: its keys and their meaning do not change within a schema number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchweave.diagnose.model import CauseFound, Diagnosis, Watched

SCHEMA = 1
# microseconds are enough for a reader, and keep the text short
_DIGITS = 6


def record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as JSON values."""
    found, talk = diagnosis.numbers, diagnosis.communication
    return {
        "schema": SCHEMA,
        "file": _text(diagnosis.file),
        "rank": diagnosis.rank,
        "verdict": diagnosis.verdict,
        "sentence": _text(diagnosis.sentence),
        "sides": list(diagnosis.sides.names),
        "sides_why": diagnosis.sides.why,
        **{name: _ms(getattr(found, name)) for name in ("span_ms", "busy_ms", "overlapped_ms")},
        **{name: _ms(getattr(found, name)) for name in ("possible_ms", "lost_ms", "idle_ms", "both_ms")},
        "communication": None if talk is None else {name: _ms(value) for name, value in asdict(talk).items()},
        "streams": [
            {
                "device": stream.device,
                "stream": stream.stream,
                "ops": stream.num_ops,
                "busy_ms": _ms(stream.busy_ms),
                "idle_ms": _ms(stream.idle_ms),
            }
            for stream in diagnosis.streams
        ],
        "causes": [_cause(cause) for cause in diagnosis.causes],
        # only a watched run has it
        **({} if diagnosis.watched is None else {"watched": _watched(diagnosis.watched)}),
        "remarks": [_text(remark) for remark in diagnosis.remarks],
        "not_known": list(diagnosis.not_known),
        "warnings": [_text(warning) for warning in diagnosis.warnings],
    }


def to_json(diagnoses: Sequence[Diagnosis], *, as_list: bool, differences: Sequence[str] = ()) -> str:
    """Return diagnoses as JSON text.

    Args:
        diagnoses: At least one.
        as_list: A list even if there is one.
        differences: What differs between them as ranks of one job: `between_ranks` of each.
    """
    records = [record(diagnosis) for diagnosis in diagnoses]
    if differences:
        records = [{**each, "between_ranks": list(differences)} for each in records]
    return json.dumps(records if as_list else records[0], indent=1, allow_nan=False) + "\n"


def _watched(watched: Watched) -> dict[str, Any]:
    return {
        "steps": watched.num_steps,
        "step_ms": _ms(watched.watched_ms),
        "plain_step_ms": _ms(watched.plain_ms),
        "factor": _ms(watched.factor),
    }


def _cause(cause: CauseFound) -> dict[str, Any]:
    return {
        "cause": cause.cause,
        "lost_ms": _ms(cause.lost_ms),
        "idle_ms": _ms(cause.idle_ms),
        "recoverable": cause.recoverable,
        "certainty": cause.certainty,
        "where": {name: _text_or_none(value) for name, value in asdict(cause.where).items()},
        "evidence": _text(cause.evidence),
        "mend": cause.mend,
        "places": [
            {
                "where": {name: _text_or_none(value) for name, value in asdict(place.where).items()},
                "cost_ms": _ms(place.cost_ms),
                "count": place.count,
            }
            for place in cause.places
        ],
    }


def _ms(value: float) -> float:
    # minus zero would look like a mistake
    return round(value, _DIGITS) + 0.0


def _text(value: str) -> str:
    """Return text without lone surrogates, which JSON readers refuse."""
    return value.encode("utf-8", "replace").decode("utf-8")


def _text_or_none(value: Any) -> Any:
    return _text(value) if isinstance(value, str) else value
