"""Data inside a page: columns as base64, and JSON that cannot end the element it lies in."""

from __future__ import annotations

import base64
import json
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchweave.diagnose.model import Diagnosis, Lane
from torchweave.intervals import Intervals
from torchweave.reporting.strip import mark
from torchweave.reporting.tracks import both_sides, side_titles

Column: TypeAlias = dict[str, Any]

# the least of these that holds a column's values is used; the page knows them by these names
_TYPES = (("u1", "<u1", 2**8), ("u2", "<u2", 2**16), ("u4", "<u4", 2**32))


def column(values: npt.NDArray[Any]) -> Column:
    """Return numbers as the page decodes them: `{"type": "u4", "base64": "..."}`, little-endian.

    Args:
        values: Whole numbers, shape (n,); beyond 32 bits or below zero they become float64, exact up to 2**53.
    """
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    kind, dtype = next(((kind, dtype) for kind, dtype, end in _TYPES if low >= 0 and high < end), ("f8", "<f8"))
    return {"type": kind, "base64": base64.b64encode(values.astype(dtype).tobytes()).decode()}


def times(begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> dict[str, Column]:
    """Return sorted times as gaps between begins and as lengths: small numbers, so narrow columns.

    Args:
        begin: Begins, sorted, ns.
        end: Ends, ns.
    """
    return {"gap": column(np.diff(begin, prepend=0)), "length": column(end - begin)}


def section_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what the lanes of one diagnosis are drawn from."""
    used = np.unique(np.concatenate([lane.name for lane in diagnosis.lanes] or [np.zeros(0, dtype=np.int64)]))
    return {
        "span": round(diagnosis.numbers.span_ms * 1e6),
        "sides": side_titles(diagnosis),
        "names": [diagnosis.names[code] for code in used],
        "lanes": [_lane(lane, used) for lane in diagnosis.lanes],
        "both": _intervals(both_sides(diagnosis)),
        "causes": [
            {
                "mark": mark(row),
                "name": found.cause,
                "lost": _intervals(found.lost_intervals),
                "idle": _intervals(found.idle_intervals),
            }
            for row, found in enumerate(diagnosis.causes)
        ],
    }


def safe_json(value: Any) -> str:
    r"""Return JSON for a `<script type="application/json">`.

    `<`, `>` and `&` become `\u003c` and so on, so that no text in it can end the element or open a comment.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _lane(lane: Lane, used: npt.NDArray[np.int64]) -> dict[str, Any]:
    return {
        "device": lane.device,
        "stream": lane.stream,
        **times(lane.begin, lane.end),
        "name": column(np.searchsorted(used, lane.name)),
        "side": column(lane.side),
    }


def _intervals(intervals: Intervals) -> dict[str, Column]:
    return times(intervals[:, 0], intervals[:, 1])
