"""When the actions of a pipeline ran: `PP:0F3` and the like, as torchweave's runner and torch's annotate them."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from torchweave.diagnose.window import launch_begin
from torchweave.trace.timeline import Flags, Ints, Timeline

# forward, backward and its halves, and pairs; sends and receives happen beside them
_COMPUTING = re.compile(r"PP:(\d+[FBIW]\d+|\([^()]*\)OVERLAP_F_B)")
_LEAF = re.compile(r"(\d+)([FBIW])(\d+)")
# operators that wait for other ranks, or only begin to
_COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms", "PP:")


class Ran(NamedTuple):
    """An action that ran.

    Attributes:
        text: The action as it was annotated, without `PP:`.
        begin_ns: When its first work began, on the recorder's own clock.
        end_ns: When its last work ended.
    """

    text: str
    begin_ns: int
    end_ns: int


def ran(timeline: Timeline) -> tuple[Ran, ...]:
    """Return the computing actions of the last whole step in a trace, in their order.

    An action lasts from the begin of its first work to the end of its last: what the device ran of what was launched
    in it, by whichever thread; in a trace without a device, its operators. So the wait for a receive, with which an
    action often begins on the host, is no part of it.

    Args:
        timeline: One rank's trace.
    """
    texts, begin, end = _outermost(timeline)
    at, first, last = _work(timeline)
    row = np.searchsorted(begin, at, side="right") - 1
    inside = (row >= 0) & (at < end[np.maximum(row, 0)]) if len(begin) else np.zeros(len(at), dtype=np.bool_)
    # what launched nothing (an input gradient of the first stage) took no time, when its wait was over
    far = np.iinfo(np.int64)
    begins, ends = np.full(len(begin), far.max), np.full(len(begin), far.min)
    np.minimum.at(begins, row[inside], first[inside])
    np.maximum.at(ends, row[inside], last[inside])
    nothing = begins > ends
    begins[nothing] = ends[nothing] = end[nothing]
    found = [
        Ran(text, int(first_ns) + timeline.origin_ns, int(last_ns) + timeline.origin_ns)
        for text, first_ns, last_ns in zip(texts, begins, ends, strict=True)
    ]
    return _last_step(found)


def _outermost(timeline: Timeline) -> tuple[list[str], Ints, Ints]:
    """Return the computing actions with their times on the host; of a pair not its halves, on whichever thread."""
    notes = timeline.annotations
    matches = {code: match for code, name in enumerate(timeline.names) if (match := _COMPUTING.fullmatch(name))}
    texts: list[str] = []
    rows: list[int] = []
    until = np.iinfo(np.int64).min
    for row in range(len(notes)):
        match = matches.get(int(notes.name[row]))
        if match and notes.begin[row] >= until:
            texts.append(match[1])
            rows.append(row)
            until = notes.end[row]
    return texts, notes.begin[rows], notes.end[rows]


def _work(timeline: Timeline) -> tuple[Ints, Ints, Ints]:
    """Return when each piece of work was launched, began and ended."""
    work, ops = timeline.work, timeline.ops
    if len(work):
        return launch_begin(timeline, work), work.begin, work.end
    kept: Flags = np.array([not name.startswith(_COMMUNICATION) for name in timeline.names] or [False])[ops.name]
    return ops.begin[kept], ops.begin[kept], ops.end[kept]


def _last_step(found: list[Ran]) -> tuple[Ran, ...]:
    """Return the last whole step: as many actions as there are different ones, each backward behind its forward.

    A step that began earlier or later than it really did would have the forward of its first action at its end, behind
    that one's backward.
    """
    length = len({action.text for action in found})
    for begin in range(len(found) - length, -1, -1):
        if _is_step(found[begin : begin + length]):
            return tuple(found[begin : begin + length])
    return tuple(found[-length:])


def _is_step(actions: list[Ran]) -> bool:
    forwards: set[tuple[str, str]] = set()
    texts: set[str] = set()
    for action in actions:
        for stage, kind, microbatch in _LEAF.findall(action.text):
            if kind == "F":
                forwards.add((stage, microbatch))
            elif (stage, microbatch) not in forwards:
                return False
        texts.add(action.text)
    return len(texts) == len(actions)
