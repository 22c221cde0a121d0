"""Whole steps, timed in turn: a machine's clock drifts by more than what is to be seen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

WARMUP = 2  # rounds that are dropped: kinds of pairs are recorded, shapes are learnt, allocators fill


def in_turn(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: torch.device,
    *,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[str, Any], Any] = lambda *_: None,
    warmup: int = WARMUP,
) -> dict[str, list[float]]:
    """Return how long each way takes in each round, ms, on the slowest rank; all ranks begin together.

    `before` is called before each step, and `after` with the way's name and what it returned; neither is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warmup + rounds):
        for name, step in ways.items():
            before()
            wait(device)
            dist.barrier()
            wait(device)
            begin = time.perf_counter()
            found = step()
            wait(device)
            spent_ms = (time.perf_counter() - begin) * 1e3
            after(name, found)
            del found
            if number >= warmup:
                times[name].append(spent_ms)
    every = gathered(times)
    return {name: [max(found) for found in zip(*(theirs[name] for theirs in every), strict=True)] for name in times}


def rates(times: Mapping[str, list[float]], tokens: int, baseline: str = "serial") -> dict[str, Any]:
    """Return what a result file says of such times: tokens per second, and the gain over a baseline, round by round."""
    found = {name: [tokens / spent_ms * 1e3 for spent_ms in spent] for name, spent in times.items()}
    said = {
        "tokens_per_second": {name: statistics.median(values) for name, values in found.items()},
        "quartiles": {name: quartiles(values) for name, values in found.items()},
    }
    if baseline in times:
        # of each round by itself, so that a clock that drifts does not count
        said["speedup"] = {
            name: statistics.median(b / t for b, t in zip(times[baseline], spent, strict=True))
            for name, spent in times.items()
            if name != baseline
        }
    return said


def quartiles(values: list[float]) -> list[float]:
    """Return the first and third quartile."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def wait(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gathered(value: Any) -> list[Any]:
    """Return what every rank has."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


class Equality:
    """Whether several ways compute the same bits, step by step: what each returns is compared with the first one's."""

    def __init__(self) -> None:
        self._different: set[str] = set()
        self._truth: tuple[str, list[torch.Tensor]] | None = None

    def see(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Compare a step's tensors with those of the first way, which keep standing until that way's next step."""
        if self._truth is None or self._truth[0] == name:
            self._truth = (name, [tensor.detach().clone() for tensor in tensors])
            return
        truth = self._truth[1]
        if len(truth) != len(tensors) or not all(map(torch.equal, truth, tensors)):
            self._different.add(name)

    def said(self) -> dict[str, Any]:
        """Return for a result file whether it holds on every rank, and for which ways it does not."""
        different = sorted(set().union(*gathered(self._different)))
        return {"bit_equal": not different, **({"different": different} if different else {})}
