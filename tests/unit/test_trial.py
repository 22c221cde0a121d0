"""Which strategy `auto` takes: from scripted times, so that nothing depends on this machine's clock."""

from __future__ import annotations

import time

import pytest

from torchweave.engine import trial as trial_module
from torchweave.engine.sample import Events, Sample
from torchweave.engine.trial import (
    AGAIN_AFTER,
    AGAIN_FACTOR,
    MEASURED,
    READ,
    REORDERED,
    ROUNDS,
    SEARCH_PAIRS,
    SETTLE,
    WATCH_EVERY,
    WATCHED,
    Trial,
    slowest,
)

ALL = ("turns", "streams", "serial")


class Rank:
    """One rank's trial, whose pairs take what a script says."""

    def __init__(self, monkeypatch, candidates=ALL, why_not="", others=(), search=None):
        self.others, self.shared, self.strategy = list(others), [], ""
        self.cost = {}
        rank = self

        class Scripted:
            def __init__(self, events):
                self.cost_ms = rank.cost[rank.strategy] if rank.strategy else 0.0

            def end(self):
                self.cost_ms = rank.cost[rank.strategy]

            def ms(self, limit_s):
                return self.cost_ms

        monkeypatch.setattr(trial_module, "Sample", Scripted)
        self.trial = Trial(candidates, why_not, self.share, 1.0, search)

    def share(self, number, times):
        self.shared.append((number, dict(times)))
        others = {index + 1: other(number, times) for index, other in enumerate(self.others)}
        return lambda: {0: times, **others}

    def run(self, num_pairs, cost):
        """Run pairs; `cost` says what one takes by a strategy, ms."""
        ran = []
        for _ in range(num_pairs):
            with self.trial.pair() as strategy:
                self.strategy, self.cost = strategy, cost
            ran.append(strategy)
        return ran


TRIED = ROUNDS * len(ALL)
UNTIL_CHOSEN = TRIED + SETTLE + READ + 1


def test_each_strategy_is_tried_as_often_as_the_others(monkeypatch):
    """Catches a strategy that is judged by fewer pairs, or in one block in which the clock drifts."""
    rank = Rank(monkeypatch)
    assert rank.run(TRIED, dict.fromkeys(ALL, 1.0)) == list(ALL) * ROUNDS


@pytest.mark.parametrize("best", ["turns", "streams"])
def test_the_fastest_is_taken(monkeypatch, best):
    """Catches a choice that does not look at the times."""
    rank = Rank(monkeypatch)
    cost = {"turns": 9.0, "streams": 9.5, "serial": 10.0, best: 5.0}
    ran = rank.run(UNTIL_CHOSEN + AGAIN_AFTER - 1, cost)
    assert set(ran[UNTIL_CHOSEN - 1 :]) == {best}
    assert rank.trial.times_ms == cost
    assert rank.trial.reason == "the fastest of " + ", ".join(f"{name} {cost[name]:.2f} ms" for name in ALL)


def test_what_is_hardly_faster_is_noise(monkeypatch):
    """Catches weaving for a gain that is not there."""
    rank = Rank(monkeypatch)
    rank.run(UNTIL_CHOSEN, {"turns": 9.95, "streams": 12.0, "serial": 10.0})
    assert rank.trial.choice == "serial"
    assert "no strategy is faster than serial" in rank.trial.reason
    assert "turns 9.95 ms" in rank.trial.reason


def test_the_first_pair_of_a_strategy_does_not_count(monkeypatch):
    """Catches plans that are made once counting against the strategy that makes them."""
    rank = Rank(monkeypatch)
    rank.run(len(ALL), {"turns": 500.0, "streams": 500.0, "serial": 1.0})
    rank.run(UNTIL_CHOSEN - len(ALL), {"turns": 5.0, "streams": 6.0, "serial": 10.0})
    assert rank.trial.choice == "turns"


def test_nothing_is_tried_where_only_serial_may_run(monkeypatch):
    """Catches pairs that are timed, and ranks that wait for each other, for nothing."""
    rank = Rank(monkeypatch, candidates=("serial",), why_not="nothing to hide")
    assert set(rank.run(300, {"serial": 1.0})) == {"serial"}
    assert rank.shared == []
    assert rank.trial.reason == "nothing to hide"


def test_one_candidate_is_taken_without_a_trial(monkeypatch):
    """Catches a comparison with a serial run that was never measured."""
    rank = Rank(monkeypatch, candidates=("turns",), why_not="not tried here")
    assert set(rank.run(300, {"turns": 1.0})) == {"turns"}
    assert rank.shared == []
    assert rank.trial.is_settled
    assert rank.trial.reason == "not tried here"


def test_the_slowest_rank_decides_on_every_rank(monkeypatch):
    """Catches ranks that choose by their own times, and then meet under two strategies."""
    one, other = {"turns": 5.0, "streams": 8.0, "serial": 10.0}, {"turns": 30.0, "streams": 9.0, "serial": 10.0}
    chosen = set()
    for mine, theirs in ((one, other), (other, one)):
        rank = Rank(monkeypatch, others=[lambda number, times, theirs=theirs: theirs])
        rank.run(UNTIL_CHOSEN, mine)
        chosen.add(rank.trial.choice)
    assert chosen == {"streams"}


def test_times_are_said_before_they_are_read(monkeypatch):
    """Catches ranks that wait for each other at once, where the others are a few pairs behind."""
    rank = Rank(monkeypatch)
    rank.run(TRIED + SETTLE, {"turns": 5.0, "streams": 8.0, "serial": 10.0})
    assert rank.shared == []
    rank.run(1, rank.cost)
    assert [number for number, _ in rank.shared] == ["1"]
    assert rank.trial.times_ms == {}
    rank.run(READ, rank.cost)
    assert rank.trial.choice == "turns"


def test_a_choice_that_becomes_slower_than_serial_is_tried_again(monkeypatch):
    """Catches a choice for ever, whatever changes on the machine."""
    rank = Rank(monkeypatch)
    rank.run(UNTIL_CHOSEN - 1, {"turns": 5.0, "streams": 8.0, "serial": 10.0})
    worse = {"turns": 20.0, "streams": 21.0, "serial": 10.0}
    ran = rank.run(WATCHED + SETTLE + READ, worse)
    assert set(ran) == {"turns"}
    ran = rank.run(UNTIL_CHOSEN, worse)
    assert ran[:TRIED] == list(ALL) * ROUNDS
    assert rank.trial.choice == "serial"
    assert set(rank.run(AGAIN_AFTER, worse)) == {"serial"}


def test_all_are_tried_again_later_and_later(monkeypatch):
    """Catches a choice for ever that was made while the allocator still grew, and trials that never end."""
    rank = Rank(monkeypatch)
    young = {"turns": 20.0, "streams": 21.0, "serial": 10.0}
    rank.run(UNTIL_CHOSEN - 1, young)
    grown = {"turns": 5.0, "streams": 8.0, "serial": 10.0}
    settled = "serial"
    for index in range(3):
        assert not rank.trial.is_settled
        # the first of them reads what all ranks said
        assert set(rank.run(AGAIN_AFTER * AGAIN_FACTOR**index, grown)) == {settled}
        assert rank.trial.is_settled
        assert rank.run(UNTIL_CHOSEN - 1, grown)[:TRIED] == list(ALL) * ROUNDS
        settled = "turns"


def test_a_choice_that_stays_good_is_kept_and_watched(monkeypatch):
    """Catches watching that ends after the first look, and one that makes all be tried."""
    rank = Rank(monkeypatch)
    cost = {"turns": 5.0, "streams": 8.0, "serial": 10.0}
    monkeypatch.setattr(trial_module, "AGAIN_FACTOR", 1000)
    rank.run(UNTIL_CHOSEN - 1 + AGAIN_AFTER + UNTIL_CHOSEN - 1, cost)
    rank.shared.clear()
    assert set(rank.run(3 * WATCH_EVERY, cost)) == {"turns"}
    assert [times for _, times in rank.shared] == [{"turns": 5.0}] * 3
    numbers = [int(number) for number, _ in rank.shared]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert rank.trial.num_pairs == 2 * (UNTIL_CHOSEN - 1) + AGAIN_AFTER + 3 * WATCH_EVERY


def test_a_pair_that_fails_counts_and_has_no_time(monkeypatch):
    """Catches a rank that is one pair behind the others after an exception that all of them had."""
    rank = Rank(monkeypatch)
    with pytest.raises(KeyError, match="planted"), rank.trial.pair():
        raise KeyError("planted")
    assert rank.run(2, {"turns": 5.0, "streams": 8.0, "serial": 10.0}) == ["streams", "serial"]


def test_a_strategy_without_times_is_not_chosen(monkeypatch):
    """Catches a division by what is not there where every pair of a strategy failed."""
    rank = Rank(monkeypatch)
    for _ in range(ROUNDS):
        with pytest.raises(KeyError, match="planted"), rank.trial.pair():
            raise KeyError("planted")
        rank.run(2, {"streams": 8.0, "serial": 10.0})
    rank.run(SETTLE + READ + 1, {"turns": 1.0, "streams": 8.0, "serial": 10.0})
    assert rank.trial.choice == "streams"
    assert slowest({0: {"turns": 1.0, "serial": 2.0}, 1: {"serial": 3.0}}) == {"serial": 3.0}


class Found:
    """A search that finds an order, or nothing, when it is over."""

    def __init__(self, finds):
        self.finds, self.asked = finds, []

    def advance(self, num_pairs):
        self.asked.append(num_pairs)
        return self.finds and num_pairs == SEARCH_PAIRS


REORDERED_COST = {"turns": 8.0, "streams": 9.0, "serial": 10.0, REORDERED: 5.0, MEASURED: 1.0}


@pytest.mark.parametrize("candidates", [ALL, ("turns", "serial")])
def test_another_order_that_was_found_is_tried_and_may_win(monkeypatch, candidates):
    """Catches an order that is taken because a forecast says so, and one that is found too late to be tried."""
    search = Found(True)
    rank = Rank(monkeypatch, candidates=candidates, search=search)
    others = list(candidates) * (ROUNDS if len(candidates) == 3 else ROUNDS + 1)
    tried = [others[0], MEASURED, *others[1:], *[REORDERED] * ROUNDS]
    assert rank.run(len(tried), REORDERED_COST) == tried
    rank.run(SETTLE + READ + 1, REORDERED_COST)
    assert rank.trial.choice == REORDERED
    assert MEASURED not in rank.trial.times_ms
    assert rank.trial.times_ms[REORDERED] == 5.0


def test_another_order_that_is_slower_than_forecast_is_dropped(monkeypatch):
    """Catches a forecast that is believed against the clock."""
    rank = Rank(monkeypatch, search=Found(True))
    rank.run(1 + TRIED + ROUNDS + SETTLE + READ + 1, {**REORDERED_COST, REORDERED: 8.5})
    assert rank.trial.choice == "turns"


def test_where_no_other_order_is_found_nothing_more_is_tried(monkeypatch):
    """Catches pairs that are run in an order that nobody found."""
    rank = Rank(monkeypatch, search=Found(False))
    assert rank.run(1 + TRIED, REORDERED_COST) == [ALL[0], MEASURED, *(ALL * ROUNDS)[1:]]
    assert set(rank.run(SETTLE + READ, REORDERED_COST)) == {"turns"}
    assert rank.trial.choice == "turns"


def test_an_order_is_searched_once(monkeypatch):
    """Catches a second measured pair, and an order that is forgotten, where all are tried again."""
    search = Found(True)
    rank = Rank(monkeypatch, search=search)
    rank.run(1 + TRIED + ROUNDS + SETTLE + READ, REORDERED_COST)
    worse = dict.fromkeys(REORDERED_COST, 30.0) | {"serial": 29.0}
    num_asked = len(search.asked) + 1
    rank.run(WATCHED + SETTLE + READ, worse)
    assert rank.run(4 * ROUNDS, worse) == [*ALL, REORDERED] * ROUNDS
    assert len(search.asked) == num_asked


def test_nothing_is_searched_where_nothing_is_tried(monkeypatch):
    """Catches a measured pair where measuring is switched off."""
    rank = Rank(monkeypatch, candidates=("turns",), why_not="not tried here", search=Found(True))
    assert set(rank.run(40, {"turns": 1.0})) == {"turns"}


def test_a_sample_is_the_time_on_the_host():
    """Catches a time that leaves out what the pair did, where no device is in sight."""
    sample = Sample(Events())
    time.sleep(0.02)
    sample.end()
    time.sleep(0.05)
    assert 20 <= sample.ms(1.0) < 60
    assert sample.ms(1.0) == sample.ms(1.0)
