"""Transfers between two ranks in their traces: how long they took, and how much of that was behind computation.

A kernel of NCCL's that sends or receives lasts from where its stream comes to it until the transfer is over, and the
wait for the other rank is in it. Bytes move only while the kernels of both ranks are there. Between two ranks on one
communicator the kernels of both come in one order, so that the n-th of one rank and the n-th of the other are one
transfer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchweave.intervals import intersection, length, union
from torchweave.measure.hidden import is_communication

SEND_RECEIVE = "SendRecv"
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class DeviceWork(NamedTuple):
    """What a device did, in ns of the machine's clock, which its ranks share.

    Attributes:
        transfers: Begin and end of each kernel that sends or receives, in their order.
        computation: Begin and end of all that is no communication.
    """

    transfers: list[tuple[int, int]]
    computation: list[tuple[int, int]]


def device_work(trace: Path) -> DeviceWork:
    """Read what the device did from a trace, gzip."""
    whole = json.loads(gzip.decompress(trace.read_bytes()))
    base_ns = int(whole.get("baseTimeNanoseconds", 0))
    transfers, computation = [], []
    for event in whole["traceEvents"]:
        if event.get("cat") not in _WORK or "dur" not in event:
            continue
        begin = base_ns + round(event["ts"] * 1e3)
        span = (begin, begin + round(event["dur"] * 1e3))
        if not is_communication(event["name"]):
            computation.append(span)
        elif SEND_RECEIVE in event["name"]:
            transfers.append(span)
    return DeviceWork(sorted(transfers), computation)


def transfers_of(ranks: Sequence[DeviceWork]) -> dict[str, Any]:
    """Return how the transfers between two ranks went.

    Returns:
        For each rank the share of its kernels' time, and of the transfers' time, in which it computed too; and how
        long they were. A number is None where there is nothing that it could be of.
    """
    one, other = (work.transfers for work in ranks)
    matched = len(one) == len(other)
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=matched)] if matched else []
    # clocks of two devices are not one to the last microsecond: short transfers can seem to be apart
    moved = [span for span in both if span[0] < span[1]]
    return {
        "transfers": len(one),
        "matched": matched,
        "never_together": len(both) - len(moved),
        "kernel_ms": [length(union(work.transfers)) / 1e6 for work in ranks],
        "kernel_hidden_share": [_share(work.transfers, work.computation) for work in ranks],
        "transfer_ms": length(union(moved)) / 1e6,
        "transfer_hidden_share": [_share(moved, work.computation) for work in ranks],
    }


def _share(spans: list[tuple[int, int]], computation: list[tuple[int, int]]) -> float | None:
    total = length(union(spans))
    return length(intersection(union(spans), union(computation))) / total if total else None
