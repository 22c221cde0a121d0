"""Diagnoses made up for the tests of the drawn reports: of any size, with any names."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchweave.diagnose.model import (
    FIRST_SIDE,
    NO_SIDE,
    SECOND_SIDE,
    CauseFound,
    Communication,
    Diagnosis,
    Lane,
    Numbers,
    Place,
    SidesFound,
    StreamNumbers,
    Where,
)
from torchweave.intervals import Intervals, difference, intersection, length, union

MEND = """Keep the value on the device, and read it when the step is over:

    loss = model(batch)
    losses.append(loss.detach())  # not loss.item()

then once, at the end:

    print(torch.stack(losses).mean().item())"""


def diagnosis(
    *, num_ops: int = 400, num_lanes: int = 3, names: tuple[str, ...] | None = None, seed: int = 3, **other: Any
) -> Diagnosis:
    """Return a diagnosis with consistent numbers: lanes of random operations, lost moments and idle moments.

    Args:
        num_ops: Operations over all lanes.
        num_lanes: Streams.
        names: What the operations are called.
        seed: Of the random lengths.
        other: Fields of the diagnosis that are to be otherwise.
    """
    names = names or ("void gemm_128x64<float>(int, float*)", "void at::native::vectorized_kernel<4>(int)", "copy")
    random = np.random.default_rng(seed)
    lanes = tuple(_lane(row, num_ops // num_lanes, len(names), random) for row in range(num_lanes))
    busy = [union(np.column_stack((lane.begin, lane.end))) for lane in lanes]
    all_busy = union(np.concatenate(busy))
    end = int(all_busy[-1, 1])
    first, second = busy[0], busy[1] if num_lanes > 1 else busy[0][:0]
    lost, idle = difference(second, first), difference(np.array([[0, end]]), all_busy)
    both, lesser = length(intersection(first, second)), min(length(first), length(second))
    numbers = Numbers(
        span_ms=end / 1e6,
        busy_ms=length(all_busy) / 1e6,
        overlapped_ms=(sum(map(length, busy)) - length(all_busy)) / 1e6,
        possible_ms=lesser / 1e6,
        lost_ms=(lesser - both) / 1e6,
        idle_ms=length(idle) / 1e6,
        both_ms=both / 1e6,
        first_ms=length(first) / 1e6,
        second_ms=length(second) / 1e6,
    )
    fields: dict[str, Any] = {
        "file": "trace.json.gz",
        "rank": None,
        "verdict": "partial",
        "sentence": f"Forward and backward overlapped in part: {numbers.lost_ms:.2f} ms were lost.",
        "sides": SidesFound(("forward", "backward"), "Forward and backward of different microbatches ran."),
        "numbers": numbers,
        "communication": Communication(1.0, 0.75, 0.25, 0.75),
        "streams": tuple(
            StreamNumbers(lane.device, lane.stream, len(lane.begin), length(mine) / 1e6, (end - length(mine)) / 1e6)
            for lane, mine in zip(lanes, busy, strict=True)
        ),
        "causes": _causes(lost, idle, numbers),
        "lanes": lanes,
        "names": names,
        "not_known": ("Which event a stream waited for: record with `profile_all_threads` to know.",),
        "device_name": "NVIDIA H200",
    }
    return Diagnosis(**(fields | other))


def _lane(row: int, num_ops: int, num_names: int, random: np.random.Generator) -> Lane:
    lengths = random.integers(2_000, 60_000, num_ops)
    gaps = random.integers(500, 4_000, num_ops) + (random.random(num_ops) < 0.08) * random.integers(1, 200_000, num_ops)
    begin = np.cumsum(gaps + np.concatenate(([0], lengths[:-1]))) - gaps[0]
    side = np.full(num_ops, (FIRST_SIDE, SECOND_SIDE, NO_SIDE)[min(row, 2)], dtype=np.int8)
    return Lane(0, 7 + 6 * row, begin, begin + lengths, random.integers(0, num_names, num_ops), side)


def _causes(lost: Intervals, idle: Intervals, numbers: Numbers) -> tuple[CauseFound, ...]:
    """Charge two thirds of everything to one cause, the rest to another."""
    where = Where("train.py", 41, "log_loss", "aten::item", "cudaStreamSynchronize", "train_step")
    cut = np.arange(len(lost)) % 3 == 2
    idle_cut = np.arange(len(idle)) % 3 == 2
    share = length(lost[~cut]) / max(length(lost), 1)
    idle_share = length(idle[~idle_cut]) / max(length(idle), 1)
    return (
        CauseFound(
            "host_sync",
            numbers.lost_ms * share,
            numbers.idle_ms * idle_share,
            True,
            "shown",
            where,
            "12 x cudaStreamSynchronize inside aten::_local_scalar_dense held the host for 120 us in the median.",
            MEND,
            (Place(where, 1.5, 9), Place(Where(op="aten::nonzero"), 0.5, 3)),
            lost[~cut],
            idle[~idle_cut],
        ),
        CauseFound(
            "sm_full",
            numbers.lost_ms * (1 - share),
            numbers.idle_ms * (1 - idle_share),
            False,
            "likely",
            Where(),
            "The running kernel's 1,056 blocks fill all 132 multiprocessors.",
            "Give one side fewer multiprocessors, or accept it.",
            (),
            lost[cut],
            idle[idle_cut],
        ),
    )
