"""Which two kinds of work should have run together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchweave.diagnose.microbatch import forward_work, independent_backward
from torchweave.diagnose.model import FIRST_SIDE, SECOND_SIDE, SidesFound
from torchweave.diagnose.objects import aliases, objects_of
from torchweave.diagnose.window import Window, in_range, launch_begin, launch_thread
from torchweave.errors import UsageError
from torchweave.intervals import length
from torchweave.trace import link
from torchweave.trace.timeline import COPY, DEVICE_TO_HOST, HOST_TO_DEVICE, Flags, Ints

# A side or a stream that is busy for less is none: a first gradient, a flag.
LEAST_SIDE_NS = 20_000

# On one stream alone, communication below this share of the busy time is no side: no more could be gained.
LEAST_SHARE = 0.01

# so many streams are named in an error
_MOST_STREAMS = 20

FORMS = "forward, backward, compute, communication, copies, stream:N, range:NAME"

# Names come last: only what no record, annotation or stream has shown to be communication.
_COLLECTIVE_NAME = re.compile(
    r"nccl|torchweave_link|rccl|nvshmem|\bep::(?:internode|intranode)|deep_?ep\b|mscclpp|Memcpy PtoP", re.IGNORECASE
)
_COLLECTIVE_NOTE = re.compile(
    r"^(?:nccl|gloo|rccl):|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|\b(?:dispatch|combine|broadcast)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Sides:
    """Which side each operation of a window is on.

    Attributes:
        found: The sides' names, and why these.
        side: FIRST_SIDE, SECOND_SIDE or NO_SIDE for each operation.
        communication: Which operations are communication, whatever the sides are.
    """

    found: SidesFound
    side: Ints
    communication: Flags

    @property
    def two(self) -> bool:
        """Whether there are two sides at all."""
        return len(self.found.names) == 2


def choose_sides(window: Window, between: Sequence[str] | None = None) -> Sides:
    """Choose the two sides of a window.

    Args:
        window: The work.
        between: Two of the words in `FORMS`; None chooses by the rules.

    Raises:
        UsageError: A word is none of them, or selects nothing.
    """
    communication = find_communication(window)
    if between is not None:
        asked = _asked(window, between, communication)
        # streams of two devices may be asked for on purpose
        return _on_one_device(window, asked) or asked
    for rule in (_by_collectives, _by_autograd, _by_streams, _by_objects):
        sides = rule(window, communication)
        sides = _on_one_device(window, sides) if sides is not None else None
        if sides is not None:
            return sides
    why = "one stream, no collective, no independent backward, so no two kinds of work that could overlap."
    return Sides(SidesFound((), why), np.zeros(len(window.work), dtype=np.int64), communication)


def _on_one_device(window: Window, sides: Sides) -> Sides | None:
    """Keep the sides' work on the device where most could overlap: what runs elsewhere is beside neither side.

    Returns:
        None where no device holds work of both sides.
    """
    device = window.work.device
    ordinals = np.unique(device[sides.side > 0]).tolist()
    if len(ordinals) == 1:
        return sides if (sides.side == FIRST_SIDE).any() and (sides.side == SECOND_SIDE).any() else None
    lesser = {
        ordinal: min(
            length(window.busy((sides.side == side) & (device == ordinal))) for side in (FIRST_SIDE, SECOND_SIDE)
        )
        for ordinal in ordinals
    }
    best = max(ordinals, key=lambda ordinal: lesser[ordinal])
    if lesser[best] < LEAST_SIDE_NS:
        return None
    why = f"{sides.found.why} Several devices worked; the sides are those of device {best}."
    return replace(sides, found=replace(sides.found, why=why), side=np.where(device == best, sides.side, 0))


def find_communication(window: Window) -> Flags:
    """Return which operations are communication: by records, then by streams and annotations, then by name."""
    work, names = window.work, window.timeline.names
    named = np.array([_COLLECTIVE_NAME.search(name) is not None for name in names] or [False])
    result = np.asarray((work.collective >= 0) | named[work.name])
    time = (work.end - work.begin).astype(np.float64)
    total = np.bincount(window.lane, weights=time, minlength=len(window.lanes))
    noted = _under_collective_note(window) & (work.kind != COPY) if len(window.lanes) > 1 else result
    rest = time[~result].sum()
    for row in range(len(window.lanes)):
        mine = window.lane == row
        # a stream that holds most of the computation is no communication stream, whatever waits on it
        if time[mine & ~result].sum() > 0.5 * rest:
            continue
        if time[mine & result].sum() > 0.5 * total[row]:
            result |= mine
        elif total[row] < total.max() and not work.backward[mine].any() and time[mine & noted].sum() > 0.8 * total[row]:
            # a stream beside the main one that works only inside annotations such as `dispatch`
            result |= mine
    return result


def _under_collective_note(window: Window) -> Flags:
    """Return which operations were launched where the innermost annotation speaks of a collective."""
    timeline, work = window.timeline, window.work
    notes = timeline.annotations
    order = np.lexsort((-notes.end, notes.begin, notes.thread))
    begin, end, thread = notes.begin[order], notes.end[order], notes.thread[order]
    parent = link.nest(begin, end, thread)
    at = link.innermost(launch_begin(timeline, work), launch_thread(timeline, work), begin, end, thread, parent)
    speaks = np.array([_COLLECTIVE_NOTE.search(name) is not None for name in timeline.names] or [False])
    if len(order) == 0:
        return np.zeros(len(work), dtype=np.bool_)
    return np.asarray((at >= 0) & speaks[notes.name[order][np.maximum(at, 0)]])


def _by_collectives(window: Window, communication: Flags) -> Sides | None:
    if not _enough(window, communication) or not _enough(window, ~communication):
        return None
    if len(window.lanes) == 1 and length(window.busy(communication)) < LEAST_SHARE * length(window.busy()):
        return None
    copies = _own_copy_streams(window) & ~communication
    side = np.where(communication, SECOND_SIDE, FIRST_SIDE)
    side[copies | _hardly_busy(window)] = 0
    why = "Collectives ran, so communication should have run beside computation."
    return Sides(SidesFound(("compute", "communication"), why), side, communication)


def _by_autograd(window: Window, communication: Flags) -> Sides | None:
    """Forward and backward, but only of different microbatches: else one depends on the other."""
    work = window.work
    backward = work.backward
    forward = forward_work(window)
    if not _enough(window, backward) or not _enough(window, forward) or not independent_backward(window, forward):
        return None
    side = np.zeros(len(work), dtype=np.int64)
    side[forward], side[backward] = FIRST_SIDE, SECOND_SIDE
    side[_hardly_busy(window)] = 0
    why = "A backward ran whose forward is not before it in the trace, so another forward could have run beside it."
    return Sides(SidesFound(("forward", "backward"), why), side, communication)


def _by_streams(window: Window, communication: Flags) -> Sides | None:
    """The two busiest streams of one device; a stream of copies among them stands for all such streams."""
    busy = [length(window.busy(window.lane == row)) for row in range(len(window.lanes))]
    device = window.lanes[int(np.argmax(busy))][0]
    rows = [row for row, lane in enumerate(window.lanes) if lane[0] == device and busy[row] >= LEAST_SIDE_NS]
    if len(rows) < 2:
        return None
    first, second = sorted(sorted(rows, key=lambda row: -busy[row])[:2])
    copies = _own_copy_streams(window)
    is_copy = [bool(copies[window.lane == row].all()) for row in (first, second)]
    side = np.zeros(len(window.work), dtype=np.int64)
    if is_copy[0] != is_copy[1]:
        computes = ~copies & (window.work.device == device)
        side[computes], side[copies] = FIRST_SIDE, SECOND_SIDE
        why = "Copies between host and device have streams of their own, so they should have run beside computation."
        return Sides(SidesFound(("compute", "copies"), why), side, communication)
    side[window.lane == first], side[window.lane == second] = FIRST_SIDE, SECOND_SIDE
    names = tuple(f"stream:{window.lanes[row][1]}" for row in (first, second))
    why = "No collective and no independent backward ran, so the two busiest streams should have run together."
    return Sides(SidesFound(names, why), side, communication)


def _by_objects(window: Window, communication: Flags) -> Sides | None:
    """Two stream objects that the program used, and that are one CUDA stream: only a watched run knows them."""
    objects = objects_of(window)
    lane = int(np.argmax([length(window.busy(window.lane == row)) for row in range(len(window.lanes))]))
    stream = window.lanes[lane][1]
    masks = [(objects == row) & (window.lane == lane) for row in aliases(window.timeline, stream)]
    masks = sorted((mask for mask in masks if _enough(window, mask)), key=lambda mask: -length(window.busy(mask)))
    if len(masks) < 2:
        return None
    side = np.zeros(len(window.work), dtype=np.int64)
    side[masks[0]], side[masks[1]] = FIRST_SIDE, SECOND_SIDE
    why = "Two stream objects were used, so the work of the one should have run beside that of the other."
    return Sides(SidesFound((f"stream:{stream}", f"stream:{stream} by another name"), why), side, communication)


def _own_copy_streams(window: Window) -> Flags:
    """Return the operations on streams that do nothing but copy between host and device."""
    work = window.work
    copy = (work.kind == COPY) & ((work.direction == HOST_TO_DEVICE) | (work.direction == DEVICE_TO_HOST))
    other = np.bincount(window.lane, weights=(~copy).astype(np.float64), minlength=len(window.lanes))
    return np.asarray(other[window.lane] == 0)


def _hardly_busy(window: Window) -> Flags:
    """Return the operations on streams that are busy for too short a time to matter: a first gradient, a flag."""
    lanes = range(len(window.lanes))
    idle = np.array([length(window.busy(window.lane == row)) < LEAST_SIDE_NS for row in lanes])
    return np.asarray(idle[window.lane])


def _enough(window: Window, mask: Flags) -> bool:
    return bool(mask.any()) and length(window.busy(mask)) >= LEAST_SIDE_NS


def _asked(window: Window, between: Sequence[str], communication: Flags) -> Sides:
    if len(between) != 2:
        raise UsageError("Sides come in twos", given=" ".join(between), remedy=f"give two of: {FORMS}")
    masks = [_select(window, word, communication) for word in between]
    for mask, word in zip(masks, between, strict=True):
        if not mask.any():
            raise UsageError(
                "A side has to hold work",
                given=f"`{word}` selects no operation",
                remedy=f"the streams with work are {_streams(window)}; else use {FORMS}",
            )
    # where one side lies within the other, the other is the rest
    smaller = 1 if (masks[1] & ~masks[0]).any() else 0
    masks[smaller] = masks[smaller] & ~masks[1 - smaller]
    if not masks[smaller].any():
        raise UsageError(
            "The two sides have to be different work",
            given=f"`{between[0]}` and `{between[1]}` select the same operations",
            remedy=f"give two of: {FORMS}",
        )
    side = np.zeros(len(window.work), dtype=np.int64)
    side[masks[0]], side[masks[1]] = FIRST_SIDE, SECOND_SIDE
    names = (between[0], between[1])
    return Sides(SidesFound(names, "They were asked for.", "asked"), side, communication)


def _select(window: Window, word: str, communication: Flags) -> Flags:
    """Return the operations that one word of `--between` means."""
    work = window.work
    copies = (work.kind == COPY) & (work.direction != -1) & (work.direction <= DEVICE_TO_HOST)
    plain: dict[str, Callable[[], Flags]] = {
        "forward": lambda: forward_work(window) & ~communication,
        "backward": lambda: work.backward & ~communication,
        "compute": lambda: ~communication & ~copies,
        "computation": lambda: ~communication & ~copies,
        "communication": lambda: communication,
        "copies": lambda: copies,
    }
    if word in plain:
        return plain[word]()
    kind, _, value = word.partition(":")
    if kind == "stream" and re.fullmatch(r"-?[0-9]{1,18}", value):
        return np.asarray(work.stream == int(value))
    if kind == "range" and value:
        return in_range(window.timeline, work, value)
    raise UsageError("A side has to be a kind of work, a stream or a range", given=f"`{word}`", remedy=f"use {FORMS}")


def _streams(window: Window) -> str:
    numbers = sorted({stream for _, stream in window.lanes})
    text = ", ".join(f"stream:{number}" for number in numbers[:_MOST_STREAMS])
    return text + (f" and {len(numbers) - _MOST_STREAMS} more" if len(numbers) > _MOST_STREAMS else "")
