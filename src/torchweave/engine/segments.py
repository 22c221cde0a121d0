"""IDEA: what every segment of a pair and every operation takes alone, measured in one serial run at its crossings.

In a serial run nothing hides communication, so that the time from an operation's start to the end of the wait for it
is what the link takes. Moments are the host's, or, with CUDA, events on the strand's stream: then nobody waits for the
device, and what is measured are the device's own times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchweave.engine.channels import Channel
from torchweave.engine.conduct import Conduct
from torchweave.engine.forecast import away, before, wire
from torchweave.engine.observe import Log
from torchweave.engine.order import REGION, WAIT, Record
from torchweave.engine.sample import Events, await_event
from torchweave.engine.strands import Strand

# a wait that took less was for something that had ended by then: how long that took is not known
_BLOCKED_US = 20


class _Moment(NamedTuple):
    host_ns: int
    event: torch.cuda.Event | None


class Moments:
    """When each strand came to each of its steps, and when it went on after it."""

    def __init__(self) -> None:
        self._events = Events()
        self._arrived: dict[tuple[str, int], _Moment] = {}
        self._went_on: dict[tuple[str, int], _Moment] = {}

    def arrive(self, strand: str, step: int) -> None:
        """Note that a strand has come to a step, or to its end."""
        self._arrived[strand, step] = self._now()

    def go_on(self, strand: str, step: int) -> None:
        """Note that a strand goes on after a step; step -1 is its begin."""
        self._went_on[strand, step] = self._now()

    def times_us(self, records: dict[str, Record], limit_s: float) -> dict[str, float]:
        """Return what every part took, us, by the names that `forecast` has; empty where the run did not end.

        Args:
            records: The steps of each strand, by its name.
            limit_s: How long the device may be waited for, seconds.

        Raises:
            WaitLimitError: The device did not come to the end of the run.
        """
        found: dict[str, float] = {}
        free_us = 0.0
        for strand, record in records.items():
            if (strand, len(record)) not in self._arrived or (strand, -1) not in self._went_on:
                return {}
            last_us = self._us(self._went_on[strand, -1], limit_s)
            started: list[tuple[int, float]] = []
            for step, (operation, number) in enumerate((*record, (WAIT, -1))):
                moment = self._arrived.get((strand, step))
                # a turn that was taken late, or not at all, took nothing
                arrived_us = last_us if moment is None else self._us(moment, limit_s)
                found[before(strand, step)] = max(0.0, arrived_us - last_us)
                last_us = arrived_us
                if step == len(record):
                    break
                if operation not in (WAIT, REGION):
                    started.append((step, arrived_us))
                    found[wire(strand, step)] = 0.0
                    continue
                if (strand, step) in self._went_on:
                    last_us = self._us(self._went_on[strand, step], limit_s)
                blocked_us = last_us - arrived_us
                if operation == REGION or number == -1:
                    found[away(strand, step)] = max(0.0, blocked_us)
                elif blocked_us > _BLOCKED_US:
                    at, issued_us = started[int(number)]
                    found[wire(strand, at)] = max(0.0, last_us - max(issued_us, free_us))
                    free_us = last_us
        return found

    def _us(self, moment: _Moment, limit_s: float) -> float:
        origin = next(iter(self._went_on.values()))
        if moment.event is None or origin.event is None:
            return (moment.host_ns - origin.host_ns) / 1e3
        await_event(moment.event, limit_s)
        return float(origin.event.elapsed_time(moment.event)) * 1e3

    def _now(self) -> _Moment:
        event = self._events.record() if torch.cuda.is_initialized() else None
        return _Moment(time.perf_counter_ns(), event)


class Measuring(Conduct):
    """The conduct of a pair that runs serially and is measured: backward, then forward.

    Args:
        rank: Global rank of this process.
        channels: The channels of the record.
        log: Where begin and end times go, or None.
        moments: Where the moments of the run go.
    """

    def __init__(self, rank: int, channels: Sequence[Channel], log: Log | None, moments: Moments) -> None:
        super().__init__(rank, channels, log)
        self._moments = moments
        self._away = -1

    def begin(self, strand: Strand) -> None:
        """Note the strand's begin."""
        super().begin(strand)
        self._moments.go_on(strand.name, -1)

    def before_issue(self, strand: Strand) -> None:
        """Note that the strand starts an operation."""
        super().before_issue(strand)
        self._moments.arrive(strand.name, strand.position - 1)

    def leave(self, strand: Strand) -> None:
        """Note that the strand waits."""
        self._away = strand.position - 1
        self._moments.arrive(strand.name, self._away)

    def resumed(self, strand: Strand, wait_begun_ns: int) -> None:
        """Note that it goes on."""
        if self._away >= 0:
            self._moments.go_on(strand.name, self._away)
            self._away = -1
        super().resumed(strand, wait_begun_ns)

    def end(self, strand: Strand) -> None:
        """Note the strand's end, where it came to it."""
        if strand.error is None and strand.expected is not None:
            self._moments.arrive(strand.name, len(strand.expected))
        super().end(strand)
