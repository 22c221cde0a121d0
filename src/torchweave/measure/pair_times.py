"""IDEA: timings of one pair that can be compared: serial, woven, computation alone, communication alone.

They are interleaved, round after round, because a machine's clock drifts by more than what is to be seen.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchweave.errors import UsageError
from torchweave.measure.hidden import Profile, hidden_share_from_log, profile_of
from torchweave.measure.link import Recording, SimulatedLink
from torchweave.measure.stopwatch import Stopwatch

T = TypeVar("T")
Pair = tuple[Callable[[], Any], Callable[[], Any]]
Segments = Callable[[], Sequence[tuple[int, int]]]
Progress = Callable[[int, int], None]

NAMES = ("serial", "woven", "compute", "communication")
BESIDE = ("serial", "compute", "communication")


def serially(*, forward: Callable[[], T], backward: Callable[[], Any]) -> T:
    """Run a pair as it runs without torchweave: backward, then forward."""
    backward()
    return forward()


def _silent(_done: int, _total: int) -> None:
    return


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
        idle_share: Time of a woven pair in which a device did nothing, of all; None without a device.
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
    idle_share: float | None
    spread: dict[str, tuple[float, float]]
    samples: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class PairBench:
    """Measures one kind of pair.

    Args:
        make_pair: Returns (forward, backward) afresh; the backward's graph is built in it, and not timed.
        weaves: What runs both at once, by a name of your own: each is called with `forward=` and `backward=`.
        link: The link under torch.distributed, entered.
        group: The ranks that run the pair together.
        device: Where they compute.
        makers: Returns a pair afresh for a weave that needs one of its own, by the weave's name.
        segments: Returns begin and end of what the last woven pair computed on a CPU (`perf_counter_ns`). Without it
            communication counts as hidden while nobody waits for it, which is exact where strands take turns.
    """

    make_pair: Callable[[], Pair]
    weaves: Mapping[str, Callable[..., Any]]
    link: SimulatedLink
    group: dist.ProcessGroup
    device: torch.device
    makers: Mapping[str, Callable[[], Pair]] = field(default_factory=dict)
    segments: Segments | None = None

    def run(self, rounds: int = 7, warmup: int = 3, progress: Progress = _silent) -> dict[str, PairTimes]:
        """Measure the timings, interleaved.

        Args:
            rounds: How many samples each timing gets.
            warmup: Rounds before that, which are dropped.
            progress: Told how many rounds are done, and how many there are.

        Returns:
            By the weaves' names: medians, spread and samples, the same on every rank.

        Raises:
            UsageError: Fewer than two rounds.
        """
        if rounds < 2:
            raise UsageError("A median and its spread need at least two rounds", given=str(rounds), remedy="rounds=7")
        samples: dict[str, list[float]] = {name: [] for name in (*BESIDE, *self.weaves)}
        profiles: dict[str, list[Profile]] = {name: [] for name in self.weaves}
        watch, recording = Stopwatch(self.device, self.group), self._record()
        with no_collection():
            for index in range(warmup + rounds):
                measured, profiled = self._round(watch, recording)
                progress(index + 1, warmup + rounds)
                if index >= warmup:
                    for name in samples:
                        samples[name].append(measured[name])
                    for name, profile in profiled.items():
                        profiles[name].append(profile)
        if self.device.type == "cuda":
            for name, weave in self.weaves.items():
                forward, backward = self._prepare(name)
                call = functools.partial(weave, forward=forward, backward=backward)
                # together: a collective that waits for a rank that is late would count as communication
                profiles[name] = [profile_of(call, functools.partial(dist.barrier, self.group))]
        slowest, everywhere = self._over_ranks(samples, profiles)
        return {
            name: summarize({"woven": slowest[name], **{one: slowest[one] for one in BESIDE}}, everywhere[name])
            for name in self.weaves
        }

    def _prepare(self, name: str = "") -> Pair:
        with self.link.pause():
            return self.makers.get(name, self.make_pair)()

    def _record(self) -> Recording:
        forward, backward = self._prepare()
        with self.link.record() as recording:
            backward()
            forward()
        return recording

    def _round(self, watch: Stopwatch, recording: Recording) -> tuple[dict[str, float], dict[str, Profile]]:
        measured: dict[str, float] = {}
        profiles: dict[str, Profile] = {}
        forward, backward = self._prepare()
        measured["serial"] = watch.time_ms(lambda: (backward(), forward()))
        for name, weave in self.weaves.items():
            forward, backward = self._prepare(name)
            self.link.log.clear()
            measured[name] = watch.time_ms(functools.partial(weave, forward=forward, backward=backward))
            if self.device.type == "cpu":
                segments = self.segments() if self.segments else None
                profiles[name] = Profile(hidden_share_from_log(self.link.log, segments), None)
        forward, backward = self._prepare()
        with self.link.mute():
            measured["compute"] = watch.time_ms(lambda: (backward(), forward()))
        measured["communication"] = watch.time_ms(recording.replay)
        return measured, profiles

    def _over_ranks(
        self, samples: dict[str, list[float]], profiles: dict[str, list[Profile]]
    ) -> tuple[dict[str, list[float]], dict[str, list[Profile]]]:
        """Return the slowest rank's time of every sample, and all ranks' profiles."""
        everything: list[Any] = [None] * dist.get_world_size(self.group)
        with self.link.pause():
            dist.all_gather_object(everything, (samples, profiles), group=self.group)
        slowest = {
            name: [max(times) for times in zip(*(theirs[name] for theirs, _ in everything), strict=True)]
            for name in samples
        }
        return slowest, {name: [one for _, theirs in everything for one in theirs[name]] for name in profiles}


def summarize(samples: dict[str, list[float]], profiles: Sequence[Profile]) -> PairTimes:
    """Turn samples into medians, spread and shares.

    Args:
        samples: For each of the four ways, a time for each round, ms.
        profiles: Of the woven pairs, over rounds and ranks.

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
        hidden_share=_mean([profile.hidden_share for profile in profiles]),
        idle_share=_mean([profile.idle_share for profile in profiles]),
        spread={name: (quartiles[name][0], quartiles[name][2]) for name in NAMES},
        samples={name: samples[name] for name in NAMES},
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of the timed pairs."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
