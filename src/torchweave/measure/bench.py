"""IDEA: one chunk measured whole: every strategy beside serial and both bounds, memory, and the host's cost."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchweave.engine.choose import AUTO
from torchweave.engine.pair import choices, engine, weave
from torchweave.engine.trial import REORDERED, SERIAL
from torchweave.measure.crossing_cost import host_cost_us
from torchweave.measure.meeting import Meeting
from torchweave.measure.pair_times import Pair, PairBench, PairTimes, serially
from torchweave.measure.subject import Subject, SubjectOptions
from torchweave.measure.training import Progress, name_of, on_this_rank, taken, versions

# where sizes change from pair to pair, a device's allocator grows for some 50 pairs
NUM_BEFORE = 15


class Way(NamedTuple):
    """Another way to run a pair than weave's.

    Attributes:
        run: Called with `forward=` and `backward=`.
        make_pair: Returns them afresh; None takes those that weave runs.
        is_bit_equal: Returns whether this rank's loss and gradients are those of a serial run; None looks by itself.
    """

    run: Callable[..., Any]
    make_pair: Callable[[], Pair] | None = None
    is_bit_equal: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured.

    Args:
        subject: The model and its link.
        strategies: What is measured beside serial.
        rounds: How many samples each timing gets.
    """

    subject: SubjectOptions = field(default_factory=SubjectOptions)
    strategies: tuple[str, ...] = ("turns", "streams", "auto")
    rounds: int = 20


class Bench:
    """One rank of a benchmark, within a process group that is up.

    Args:
        options: What is measured.
        device: Where this rank computes.
        peers: Makes more ways to run a pair of this model, by name.
        group: The user's own group, over all ranks; None takes the default group.
    """

    def __init__(
        self,
        options: BenchOptions,
        device: torch.device,
        peers: Callable[[Subject], Mapping[str, Way]] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.options, self.device = options, device
        self.subject = Subject(options.subject, device, group=group)
        self._meeting = Meeting(self.subject.group)
        self._ways = {name: Way(functools.partial(weave, strategy=name)) for name in options.strategies}
        self._ours = {name: way.run for name, way in self._ways.items()}
        self._ways |= peers(self.subject) if peers is not None else {}

    def run(self, progress: Progress) -> dict[str, Any]:
        """Measure.

        Args:
            progress: Told how far it is.

        Returns:
            The result, ready for JSON; the same on every rank.
        """
        subject = self.subject
        with subject.link:
            progress("choosing a strategy", 0, 1)
            if AUTO in self._ours:
                subject.settle(weave, NUM_BEFORE if self.device.type == "cuda" else 0)
            with engine().observe() as log:
                bench = PairBench(
                    subject.make_pair,
                    {name: way.run for name, way in self._ways.items()},
                    subject.link,
                    subject.group,
                    self.device,
                    makers={name: way.make_pair for name, way in self._ways.items() if way.make_pair is not None},
                    segments=lambda: taken(log),
                )
                times = bench.run(self.options.rounds, progress=functools.partial(progress, "measuring"))
            rows = {name: self._row(name, found) for name, found in times.items()}
            costs = self._host_costs()
            limit, chosen, link = self._limit_share(next(iter(times.values()))), subject.strategy(), str(subject.link)
        one = next(iter(times.values()))
        return {
            "device": name_of(self.device),
            "ranks": dist.get_world_size(),
            "link": link,
            "versions": versions(self.device),
            "options": {**asdict(self.options.subject), **subject.sizes, "link_gbps": subject.link.gbps},
            "rounds": self.options.rounds,
            **{name: getattr(one, name) for name in ("serial_ms", "compute_ms", "communication_ms", "bound_ms")},
            "spread": {name: one.spread[name] for name in ("serial", "compute", "communication")},
            "peak_serial_mib": self._peak_mib(Way(serially)),
            "limit_share": limit,
            "auto_takes": chosen,
            "choices": [str(choice) for choice in choices()],
            "strategies": {name: {**row, "host_us_per_crossing": costs.get(name)} for name, row in rows.items()},
        }

    def _host_costs(self) -> dict[str, float]:
        """Return what a crossing costs the host, us; for `auto`, what the strategy costs that it takes."""
        alone = dist.new_subgroups(1)[0]
        channels = engine().channels
        kept, channels.lone_groups_are_slow = channels.lone_groups_are_slow, True
        try:
            with self.subject.link.pause():
                named = {name: run for name, run in self._ours.items() if name != AUTO}
                costs = {**host_cost_us(named, alone, self.device), SERIAL: 0.0}
                # another order costs a crossing nothing: it is found beforehand
                costs |= {REORDERED: costs["turns"]} if "turns" in costs else {}
        finally:
            channels.lone_groups_are_slow = kept
        return {**costs, AUTO: costs.get(self.subject.strategy(), math.nan)}

    def _row(self, name: str, times: PairTimes) -> dict[str, Any]:
        way = self._ways[name]
        equal = way.is_bit_equal() if way.is_bit_equal is not None else self.subject.is_bit_equal(way.run)
        return {
            "woven_ms": times.woven_ms,
            "spread": times.spread["woven"],
            "recovered_share": times.recovered_share,
            "hidden_share": times.hidden_share,
            "idle_share": times.idle_share,
            "speedup": times.serial_ms / times.woven_ms,
            "bit_equal": all(json.loads(said) for said in self._meeting.tell(json.dumps(equal))),
            "peak_mib": self._peak_mib(way),
        }

    def _limit_share(self, times: PairTimes) -> float | None:
        """Return what could be recovered at most, given the SMs that a simulated link takes from the computation."""
        gain = times.serial_ms - times.bound_ms
        if gain <= 0 or self.subject.link.gbps is None:
            return None
        held = self.subject.link.held_part(self.subject.exchange_bytes, self.device)
        return 1 - times.communication_ms * held / gain

    def _peak_mib(self, way: Way) -> float | None:
        """Return the highest memory of a pair on any rank, MiB, what the backward needs included; None on a CPU."""
        if self.device.type != "cuda":
            return None
        with self.subject.link.pause():
            forward, backward = (way.make_pair or self.subject.make_pair)()
        torch.cuda.reset_peak_memory_stats(self.device)
        kept = way.run(forward=forward, backward=backward)
        torch.cuda.synchronize(self.device)
        del kept, forward, backward
        here = torch.cuda.max_memory_allocated(self.device) / 2**20
        return max(float(said) for said in self._meeting.tell(str(here)))


def run_bench(options: BenchOptions, progress: Progress) -> dict[str, Any] | None:
    """Run this process's rank of a benchmark, as torchrun's environment names it.

    Args:
        options: What is measured.
        progress: Told how far it is; on rank 0 alone.

    Returns:
        The result on rank 0, None on the others.
    """
    result = on_this_rank(lambda device, told: Bench(options, device).run(told), progress)
    return None if result is None else {"command": " ".join(["torchweave", *sys.argv[1:]]), **result}
