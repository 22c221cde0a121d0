"""IDEA: which strategy is the fastest for a kind of pair: tried in turn, agreed between the ranks, then watched.

Everything here depends on the number of the pair alone, and on times that all ranks have: so every rank that the pair
connects runs the same strategy for the same pair. Nobody waits for a device or for another rank: a rank says its times
a few pairs after it has measured them, and reads the others' a few pairs after that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from torchweave.engine.sample import Events, Sample

SERIAL = "serial"
# a serial pair whose segments are measured; `turns` in the order that was found in these times
MEASURED, REORDERED = "measured", "reordered"

# Each strategy runs so often before one is chosen. Its first pair does not count: it makes plans and takes memory.
ROUNDS = 3
# A pair's events are read so many pairs later, and what the ranks said so many pairs after that.
SETTLE, READ = 2, 2
# What is measured is shared, searched, proposed and agreed on within so many pairs, the measured one included.
SEARCH_PAIRS = 1 + SETTLE + 2 * READ
# A strategy has to be faster than serial by so much; below that it is noise.
MARGIN = 0.01
# After so many pairs the choice is compared with what serial took, over so many of them.
WATCH_EVERY, WATCHED = 128, 8
# A program's first pairs are not like those that follow: its allocator still grows, its kernels are still loaded. All
# are tried again so many pairs after the first choice, and each time after so many times as many: a trial has pairs
# that are slower than serial ones.
AGAIN_AFTER, AGAIN_FACTOR = 128, 4

Times: TypeAlias = dict[str, float]
# Says this rank's times under a name, and returns a function that returns every connected rank's.
Share: TypeAlias = Callable[[str, Times], Callable[[], Mapping[int, Times]]]


class Search(Protocol):
    """What looks for another order of turns while the strategies are tried."""

    def advance(self, num_pairs: int) -> bool:
        """Take the next step where it is time to, and say whether one has been found just now."""


class Trial:
    """Runs the pairs of one kind by each strategy in turn, and then by the fastest.

    All are tried again from time to time, less and less often.

    Where another order of turns is searched, the second pair is measured, and the order, if one was found, is tried
    after the others.

    Args:
        candidates: What may run this kind, the same on every rank; where there are several, `serial` is one.
        why_not: Why there is one alone, for the report.
        share: How ranks tell each other their times.
        limit_s: How long a device or another rank may be waited for, seconds.
        search: Looks for another order of turns; None where there is none to be found.
    """

    def __init__(
        self, candidates: Sequence[str], why_not: str, share: Share, limit_s: float, search: Search | None = None
    ) -> None:
        assert SERIAL in candidates or len(candidates) == 1
        self._candidates = tuple(candidates)
        self._search = search if len(self._candidates) > 1 else None
        # in this order
        self._tried = self._candidates * ROUNDS
        if self._search is not None:
            # as many as are needed until the search is over
            num_rounds = max(ROUNDS, -(-SEARCH_PAIRS // len(self._candidates)))
            first, *others = self._candidates * num_rounds
            self._tried = (first, MEASURED, *others)
        self._share, self._limit_s = share, limit_s
        self._events = Events()
        self._samples: list[tuple[str, Sample]] = []
        self._answer: Callable[[], Mapping[int, Times]] | None = None
        self._number = self._num_trials = 0
        self._trying = len(self._candidates) > 1
        self._again_after, self._again_at = AGAIN_AFTER, 0
        self.num_pairs = 0
        # what each strategy takes, ms: the slowest rank's
        self.times_ms: Times = {}
        self.choice = self._candidates[0]
        self.reason = "the strategies are being tried" if self._trying else why_not

    @contextmanager
    def pair(self) -> Iterator[str]:
        """Yield the strategy that runs the next pair, and take its time where that is wanted."""
        self._advance()
        strategy, wanted = self._next()
        # counted at once: a pair that fails counts on every rank
        self._number += 1
        self.num_pairs += 1
        sample = Sample(self._events) if wanted and strategy != MEASURED else None
        yield strategy
        if sample is not None:
            sample.end()
            self._samples.append((strategy, sample))

    @property
    def is_settled(self) -> bool:
        """Whether one strategy has been chosen, for now."""
        return not self._trying

    @property
    def candidates(self) -> tuple[str, ...]:
        """What may run this kind."""
        return self._candidates

    def _try_again(self) -> None:
        self._trying, self._number = True, 0
        # what was measured or asked for since the choice is of no use any more
        self._samples, self._answer = [], None

    def _next(self) -> tuple[str, bool]:
        if self._trying and self._number < len(self._tried):
            return self._tried[self._number], True
        return self.choice, self._is_watched and self._number < WATCHED

    @property
    def _is_watched(self) -> bool:
        """Whether the choice is to be compared with serial from time to time."""
        return not self._trying and self.choice != SERIAL and SERIAL in self.times_ms

    def _advance(self) -> None:
        """Say and read times where the number of the pair says so."""
        if self._trying and self._search is not None and self._search.advance(self._number - 1):
            self._candidates = (*self._candidates, REORDERED)
            self._tried = (*self._tried, *[REORDERED] * ROUNDS)
        if not self._trying and len(self._candidates) > 1 and self.num_pairs == self._again_at:
            self._try_again()
        last = len(self._tried) if self._trying else WATCHED
        if not self._trying and not self._is_watched:
            return
        if self._number == last + SETTLE:
            self._num_trials += 1
            self._answer = self._share(str(self._num_trials), self._measured())
        elif self._number == last + SETTLE + READ and self._answer is not None:
            answer, self._answer = self._answer, None
            self._judge(slowest(answer()))
        elif not self._trying and self._number == WATCH_EVERY:
            self._number = 0

    def _measured(self) -> Times:
        samples, self._samples = self._samples, []
        times: dict[str, list[float]] = {}
        for strategy, sample in samples:
            times.setdefault(strategy, []).append(sample.ms(self._limit_s))
        if self._trying:
            # the fastest: what disturbs a pair makes it slower, never faster
            return {strategy: min(found[1:], default=found[0]) for strategy, found in times.items()}
        return {strategy: statistics.median(found) for strategy, found in times.items()}

    def _judge(self, times_ms: Times) -> None:
        if not self._trying:
            now_ms, serial_ms = times_ms.get(self.choice), self.times_ms[SERIAL]
            if now_ms is not None and now_ms > serial_ms:
                self._try_again()
                worse = f"{self.choice} came to take {now_ms:.2f} ms, more than serial's {serial_ms:.2f} ms"
                self.reason = f"{worse}: all are tried again"
            return
        self.times_ms = times_ms
        self._trying, self._number = False, 0
        self._again_at = self.num_pairs + self._again_after
        self._again_after *= AGAIN_FACTOR
        # what was found stays one of them; it is not searched again
        self._tried, self._search = self._candidates * ROUNDS, None
        # a strategy is missing where none of its pairs came to its end
        best = min(times_ms, key=times_ms.__getitem__, default=SERIAL)
        serial_ms = times_ms.get(SERIAL, 0.0)
        self.choice = best if times_ms.get(best, 0.0) < serial_ms * (1 - MARGIN) else SERIAL
        told = ", ".join(f"{strategy} {ms:.2f} ms" for strategy, ms in times_ms.items())
        self.reason = f"the fastest of {told}"
        if self.choice == SERIAL:
            self.reason = f"no strategy is faster than serial by {MARGIN:.0%}: {told}"


def slowest(by_rank: Mapping[int, Times]) -> Times:
    """Return what each strategy takes, ms: a pair is as slow as its slowest rank.

    Args:
        by_rank: Each rank's times, ms; a strategy that some rank could not time is left out.
    """
    ranks = list(by_rank.values())
    return {name: max(times[name] for times in ranks) for name in ranks[0] if all(name in times for times in ranks)}
