"""IDEA: another order of turns than alternating, for one kind of pair: searched in measured times, proved, agreed.

One pair of the kind runs serially and is measured. The ranks tell each other the times, and each searches the same
numbers for the order in which a pair takes least: a strand that has more crossings than the other, or short ones, may
run several of its segments in one turn. What such an order would do on every rank is proved like the first one. As
with the strategies, everything happens at numbers of pairs, and nobody waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchweave.engine.agreement import propose
from torchweave.engine.channels import Channel
from torchweave.engine.forecast import alternating, best_order, kept_in, segments_of, span_us
from torchweave.engine.order import ALTERNATING, REGION, WAIT, Kept, Record, woven
from torchweave.engine.segments import Moments
from torchweave.engine.trial import MARGIN, READ, REORDERED, SEARCH_PAIRS, SETTLE, Share, Times

_TOPIC = "order"


class Reorder:
    """The search for one kind of pair.

    Args:
        backward: The backward strand's record.
        forward: The forward strand's record.
        channels: What the pair communicates on.
        agreements: The number of the kind's agreement on each channel.
        share: How ranks tell each other their times.
        rank: This process's global rank.
        limit_s: How long a device or another rank may be waited for, seconds.

    Attributes:
        kept: The waits at which a strand keeps its turn in the order that was found.
        told: What was found, in numbers, or why nothing; "" while it is searched.
    """

    def __init__(
        self,
        backward: Record,
        forward: Record,
        channels: Sequence[Channel],
        agreements: Mapping[str, int],
        share: Share,
        rank: int,
        limit_s: float,
    ) -> None:
        self._records = {"backward": backward, "forward": forward}
        self._channels, self._agreements, self._share = channels, agreements, share
        self._rank, self._limit_s = rank, limit_s
        self.kept, self.told = ALTERNATING, ""
        self.moments = Moments()
        self._answer: Callable[[], Mapping[int, Times]] | None = None
        self._verdict: Callable[[], dict[str, str]] | None = None

    def advance(self, num_pairs: int) -> bool:
        """Take the next step where it is time to, and say whether another order has been agreed on just now.

        Args:
            num_pairs: How many pairs have run since the one that was measured, that one included.
        """
        if num_pairs == 1 + SETTLE:
            moments, self.moments = self.moments, Moments()
            self._answer = self._share(_TOPIC, moments.times_us(self._records, self._limit_s))
        elif num_pairs == 1 + SETTLE + READ and self._answer is not None:
            answer, self._answer = self._answer, None
            self._propose(answer())
        elif num_pairs == SEARCH_PAIRS and self._verdict is not None:
            verdict, self._verdict = self._verdict, None
            refusal = verdict()[REORDERED]
            if not refusal:
                return True
            self.kept, self.told = ALTERNATING, refusal
        return False

    def _propose(self, by_rank: Mapping[int, Times]) -> None:
        """Search, and publish what is found: also where that is nothing, because the others wait for it."""
        times_us, why_not = together(by_rank)
        if not why_not:
            self.kept, self.told, why_not = better_order(self._records["backward"], self._records["forward"], times_us)
        plan = woven(self._records["backward"], self._records["forward"], self.kept)
        why = "to say which order of turns it found"
        vetoes = {REORDERED: why_not}
        self._verdict = propose(_TOPIC, why, self._channels, self._agreements, plan, vetoes, self._rank)


def better_order(backward: Record, forward: Record, times_us: Mapping[str, int]) -> tuple[Kept, str, str]:
    """Return the waits at which a strand should keep its turn, what that brings, and why the strands should alternate.

    Args:
        backward: The backward strand's record.
        forward: The forward strand's record.
        times_us: What every part takes alone, by the names that `forecast` has.

    Returns:
        The last is "" where another order is better than alternating.
    """
    strands = segments_of(backward, times_us, "backward"), segments_of(forward, times_us, "forward")
    order = best_order(*strands)
    found_us, plain_us = span_us(*strands, order), span_us(*strands, alternating(len(strands[0]), len(strands[1])))
    if found_us > plain_us * (1 - MARGIN):
        return ALTERNATING, "", f"no order is better than alternating ({plain_us / 1e3:.2f} ms) by {MARGIN:.0%}"
    told = f"{order} is predicted to take {found_us / 1e3:.2f} ms, alternating {plain_us / 1e3:.2f} ms"
    return kept_in(order, *strands), told, ""


def together(by_rank: Mapping[int, Times]) -> tuple[dict[str, int], str]:
    """Return what every part takes on the slowest rank, us, or why that cannot be said.

    Args:
        by_rank: Each rank's times, us, by the names that `forecast` has.
    """
    ranks = list(by_rank.values())
    if not all(ranks):
        return {}, "the pair to be measured did not come to its end on every rank"
    if any(times.keys() != ranks[0].keys() for times in ranks):
        return {}, "the ranks' strands have different steps"
    found = {}
    for name in ranks[0]:
        times = [one[name] for one in ranks]
        # who comes last to an operation knows how long it takes; the others waited for that rank too
        found[name] = round(min(times) if name.endswith("wire") else max(times))
    return found, ""


def is_worth_it(backward: Record, forward: Record) -> bool:
    """Whether there is more than one sensible order of turns: both strands wait, and one of them more than once."""
    waits = [sum(step[0] in (WAIT, REGION) for step in one) for one in (backward, forward)]
    return min(waits) > 0 and max(waits) > 1
