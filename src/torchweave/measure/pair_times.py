"""IDEA: four timings of one pair that can be compared: serial, woven, computation alone, communication alone.

They are interleaved, round after round, because a machine's clock drifts by more than what is to be seen.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchweave.errors import UsageError
from torchweave.measure.hidden import hidden_share_from_log, hidden_share_from_profile
from torchweave.measure.link import Recording, SimulatedLink
from torchweave.measure.stopwatch import Stopwatch

Pair = tuple[Callable[[], Any], Callable[[], Any]]
Segments = Callable[[], Sequence[tuple[int, int]]]

NAMES = ("serial", "woven", "compute", "communication")


@dataclass(frozen=True, slots=True)
class PairTimes:
    """What one pair takes, in four ways. Times are medians over the rounds, of the slowest rank in each round.

    Args:
        serial_ms: Backward, then forward.
        woven_ms: Both at once.
        compute_ms: Serial with every collective returning at once.
        communication_ms: The serial run's collectives, one after another.
        bound_ms: The larger of computation and communication alone: the least that a pair can take.
        recovered_share: (serial - woven) / (serial - bound); None where nothing can be recovered.
        hidden_share: Communication time in which computation ran too, of all communication time in a woven pair,
            from recorded intervals; the mean over the ranks. None where nothing was communicated.
        spread: For each way, the first and third quartile, ms.
        samples: For each way, every round's time, ms.
    """

    serial_ms: float
    woven_ms: float
    compute_ms: float
    communication_ms: float
    bound_ms: float
    recovered_share: float | None
    hidden_share: float | None
    spread: dict[str, tuple[float, float]]
    samples: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class PairBench:
    """Measures one kind of pair.

    Args:
        make_pair: Returns (forward, backward) afresh; the backward's graph is built in it, and not timed.
        weave: Called with `forward=` and `backward=`: what runs both at once.
        link: The link under torch.distributed, entered.
        group: The ranks that run the pair together.
        device: Where they compute.
        segments: Returns begin and end of what the last woven pair computed on a CPU (`perf_counter_ns`). Without it
            communication counts as hidden while nobody waits for it, which is exact where strands take turns.
    """

    make_pair: Callable[[], Pair]
    weave: Callable[..., Any]
    link: SimulatedLink
    group: dist.ProcessGroup
    device: torch.device
    segments: Segments | None = None

    def run(self, rounds: int = 7, warmup: int = 3) -> PairTimes:
        """Measure the four timings, interleaved.

        Args:
            rounds: How many samples each timing gets.
            warmup: Rounds before that, which are dropped.

        Returns:
            Medians, spread and samples, the same on every rank.

        Raises:
            UsageError: Fewer than two rounds.
        """
        if rounds < 2:
            raise UsageError("A median and its spread need at least two rounds", given=str(rounds), remedy="rounds=7")
        samples: dict[str, list[float]] = {name: [] for name in NAMES}
        hidden: list[float | None] = []
        watch = Stopwatch(self.device, self.group)
        recording = self._record()
        with _no_collection():
            for index in range(warmup + rounds):
                measured = self._round(watch, recording)
                if index >= warmup:
                    hidden.append(measured.pop("hidden", None))
                    for name in NAMES:
                        samples[name].append(measured[name] or 0.0)
        if self.device.type == "cuda":
            forward, backward = self._prepare()
            hidden = [hidden_share_from_profile(lambda: self.weave(forward=forward, backward=backward))]
        return summarize(*self._over_ranks(samples, hidden))

    def _prepare(self) -> Pair:
        with self.link.pause():
            return self.make_pair()

    def _record(self) -> Recording:
        forward, backward = self._prepare()
        with self.link.record() as recording:
            backward()
            forward()
        return recording

    def _round(self, watch: Stopwatch, recording: Recording) -> dict[str, float | None]:
        measured: dict[str, float | None] = {}
        forward, backward = self._prepare()
        measured["serial"] = watch.time_ms(lambda: (backward(), forward()))
        forward, backward = self._prepare()
        self.link.log.clear()
        measured["woven"] = watch.time_ms(lambda: self.weave(forward=forward, backward=backward))
        if self.device.type == "cpu":
            measured["hidden"] = hidden_share_from_log(self.link.log, self.segments() if self.segments else None)
        forward, backward = self._prepare()
        with self.link.mute():
            measured["compute"] = watch.time_ms(lambda: (backward(), forward()))
        measured["communication"] = watch.time_ms(recording.replay)
        return measured

    def _over_ranks(
        self, samples: dict[str, list[float]], hidden: list[float | None]
    ) -> tuple[dict[str, list[float]], list[float]]:
        """Return the slowest rank's time of every sample, and all ranks' hidden shares."""
        everything: list[Any] = [None] * dist.get_world_size(self.group)
        with self.link.pause():
            dist.all_gather_object(everything, (samples, hidden), group=self.group)
        slowest = {
            name: [max(times) for times in zip(*(theirs[name] for theirs, _ in everything), strict=True)]
            for name in NAMES
        }
        return slowest, [share for _, theirs in everything for share in theirs if share is not None]


def summarize(samples: dict[str, list[float]], hidden: list[float]) -> PairTimes:
    """Turn samples into medians, spread and shares.

    Args:
        samples: For each of the four ways, a time for each round, ms.
        hidden: Hidden shares of the woven pairs, over rounds and ranks.

    Returns:
        The record.
    """
    serial, woven, compute, communication = (statistics.median(samples[name]) for name in NAMES)
    bound = max(compute, communication)
    quartiles = {name: statistics.quantiles(samples[name], n=4, method="inclusive") for name in NAMES}
    return PairTimes(
        serial_ms=serial,
        woven_ms=woven,
        compute_ms=compute,
        communication_ms=communication,
        bound_ms=bound,
        recovered_share=(serial - woven) / (serial - bound) if serial > bound else None,
        hidden_share=statistics.fmean(hidden) if hidden else None,
        spread={name: (quartiles[name][0], quartiles[name][2]) for name in NAMES},
        samples=samples,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of the timed pairs."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
