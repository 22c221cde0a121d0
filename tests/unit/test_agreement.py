"""Ranks agree over a store: equal on each of them, within the limit, and a failure is told."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from torchweave.engine import agreement
from torchweave.engine.order import WAIT, woven
from torchweave.errors import BrokenGroupError, WaitLimitError

LIMIT_S = 1.0
STRAND = (("op", "world"), (WAIT, 0), ("op", "world"), (WAIT, 1))
ONE_MORE = (*STRAND, ("op", "small"), (WAIT, 2))
FINE = {"turns": "", "streams": ""}


class FakeChannel:
    """A channel without a process group."""

    def __init__(self, name, members, limit_s=LIMIT_S):
        self.name, self.group, self.members, self.group_ranks = name, name, tuple(members), tuple(members)
        self.limit_s, self.num_pairs, self.broken, self._count = limit_s, 0, "", 0

    @property
    def has_peers(self):
        return len(self.members) > 1

    def next_agreement(self):
        self._count += 1
        return self._count


@pytest.fixture
def store(monkeypatch):
    """A store that threads share as ranks would."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: shared)
    return shared


def on_ranks(*calls):
    """Run one call a rank, each on a thread of its own; return results or errors by rank."""
    told = [None] * len(calls)

    def run(rank):
        try:
            told[rank] = calls[rank]()
        except Exception as error:
            told[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return told


def speaker(rank, channels, backward=STRAND, forward=STRAND, vetoes=FINE):
    return lambda: agreement.agree(channels, woven(backward, forward), dict(vetoes), rank)


def world(size=2):
    return [[FakeChannel("world", range(size))] for _ in range(size)]


def test_equal_ranks_agree_and_may_agree_again(store):
    """Catches a second agreement that reads the first one's statements."""
    channels = world()
    assert on_ranks(*(speaker(rank, channels[rank]) for rank in range(2))) == [FINE, FINE]
    other = (*STRAND, ("op", "world"), (WAIT, 2))
    told = on_ranks(speaker(0, channels[0], STRAND, other), speaker(1, channels[1]))
    assert told[0] == told[1]
    assert told[0]["turns"] != ""


def test_a_veto_of_one_rank_holds_on_all(store):
    """Catches a rank that weaves while another runs serially."""
    channels = world()
    told = on_ranks(
        speaker(0, channels[0], vetoes={"turns": "", "streams": "no threads here"}), speaker(1, channels[1])
    )
    assert told[0] == told[1]
    assert told[0]["turns"] == ""
    assert "on rank 0, no threads here" in told[0]["streams"]


def test_a_third_rank_s_trouble_reaches_ranks_that_share_no_group_with_it(store):
    """Catches ranks 0 and 1 that weave, while 1 and 2 cannot: what connects through others has to decide alike."""
    left, right = ("op", "left"), ("op", "right")
    strands = {
        0: ((left, (WAIT, 0)), (left, (WAIT, 0))),
        1: ((left, (WAIT, 0), right, (WAIT, 1)), (left, (WAIT, 0), right, (WAIT, 1))),
        2: ((right, (WAIT, 0)), (right, (WAIT, 0))),
    }
    channels = {
        0: [FakeChannel("left", (0, 1))],
        1: [FakeChannel("left", (0, 1)), FakeChannel("right", (1, 2))],
        2: [FakeChannel("right", (1, 2))],
    }
    vetoes = {0: FINE, 1: FINE, 2: {"turns": "optimizer", "streams": "optimizer"}}
    told = on_ranks(*(speaker(rank, channels[rank], *strands[rank], vetoes[rank]) for rank in range(3)))
    assert told[0] == told[1] == told[2]
    assert "on rank 2, optimizer" in told[0]["turns"]


def test_a_rank_that_uses_a_group_its_fellow_does_not(store):
    """Catches a record that is taken for proved though a member of its group never spoke: an error, in time."""
    channels = [[FakeChannel("world", (0, 1)), FakeChannel("small", (0, 1))], [FakeChannel("world", (0, 1))]]
    begin = time.monotonic()
    told = on_ranks(speaker(0, channels[0], forward=ONE_MORE), speaker(1, channels[1]))
    assert time.monotonic() - begin < LIMIT_S + 2
    for one in told:
        assert isinstance(one, WaitLimitError) or one["turns"] != "", told


def test_groups_of_one_need_nobody(store):
    """Catches a wait for oneself."""
    assert speaker(0, [FakeChannel("lone", (0,))])() == FINE
    assert speaker(0, [])() == FINE


def test_a_rank_that_never_speaks_ends_the_wait(store):
    """Catches a wait without a limit; the error names who is late."""
    begin = time.monotonic()
    with pytest.raises(WaitLimitError, match="rank 1"):
        speaker(0, [FakeChannel("world", (0, 1))])()
    assert LIMIT_S <= time.monotonic() - begin < LIMIT_S + 1


def test_a_failure_elsewhere_ends_the_wait_at_once(store):
    """Catches a rank that waits its whole limit for one that has said that it failed."""
    channels = world()
    agreement.tell_failure(channels[1], 1, "forward strand at step 3", "KeyError: 'planted'")
    begin = time.monotonic()
    with pytest.raises(BrokenGroupError, match=r"rank 1 failed in its forward strand at step 3: KeyError: 'planted'"):
        speaker(0, channels[0])()
    assert time.monotonic() - begin < 0.5 * LIMIT_S


def fails(rank, channels, where):
    def call():
        agreement.tell_failure(channels, rank, where, "KeyError: 'planted'")
        return agreement.failed_alike(channels, rank, where, LIMIT_S)

    return call


def test_failing_alike_breaks_nothing(store):
    """Catches a group that is declared broken though all ranks stopped at the same place."""
    channels = world()
    assert on_ranks(*(fails(rank, channels[rank], "forward strand at step 3") for rank in range(2))) == ["", ""]


def test_failing_at_different_places_breaks_the_group_on_both(store):
    """Catches ranks that both failed, and are out of step all the same."""
    channels = world()
    told = on_ranks(*(fails(rank, channels[rank], f"forward strand at step {rank}") for rank in range(2)))
    assert "rank 1 failed in its forward strand at step 1" in told[0]
    assert "rank 0 failed in its forward strand at step 0" in told[1]


def test_failing_alone_is_known_after_the_limit(store):
    """Catches a rank that waits for ever for the others to fail too."""
    channels = world()
    begin = time.monotonic()
    told = fails(0, channels[0], "forward strand at step 3")()
    assert "rank 1" in told
    assert LIMIT_S <= time.monotonic() - begin < LIMIT_S + 1
    assert "rank 0 failed in its forward strand at step 3: KeyError" in agreement.failures_of_others(
        channels[1], 1, 0.0
    )


def test_a_failure_of_an_earlier_pair_is_not_one_of_this(store):
    """Catches notes of an old pair that break a new one."""
    channels = world()
    on_ranks(*(fails(rank, channels[rank], "forward strand at step 3") for rank in range(2)))
    for one in channels:
        one[0].num_pairs += 1
    assert on_ranks(*(speaker(rank, channels[rank]) for rank in range(2))) == [FINE, FINE]


def test_a_statement_comes_back_as_it_was():
    """Catches tuples that come back as lists, so that equal plans differ."""
    plan = woven(STRAND, ONE_MORE)
    one = agreement.Statement(0, FINE, plan, {"world": [0, 1]}, {"world": 3}, {"turns": 1.5})
    two = agreement.Statement.decode(one.encode())
    assert two == one
    assert one.fingerprint() == one._replace(rank=1).fingerprint()
    assert one.fingerprint() != one._replace(counts={"world": 4}).fingerprint()
    assert one.fingerprint() != one._replace(plan=plan[:-1]).fingerprint()


def test_text_of_any_kind_can_be_told(store):
    """Catches an error message with line breaks or other alphabets that breaks the note's form."""
    channels = world()
    agreement.tell_failure(channels[1], 1, "forward strand at step 3", "ValueError: über\nzwei Zeilen 語")
    assert "über\nzwei Zeilen 語" in agreement.failures_of_others(channels[0], 0, 0.0)


def times_of(rank, channels, times):
    def tell():
        counts = {channel.name: 1 for channel in channels}
        return agreement.share_times(channels, counts, rank)("1", times)()

    return tell


def test_times_reach_ranks_that_share_no_group(store):
    """Catches ranks that choose without a rank that is connected through others."""
    channels = {
        0: [FakeChannel("left", (0, 1))],
        1: [FakeChannel("left", (0, 1)), FakeChannel("right", (1, 2))],
        2: [FakeChannel("right", (1, 2))],
    }
    told = on_ranks(*(times_of(rank, channels[rank], {"turns": 1.0 + rank}) for rank in range(3)))
    assert told == [{rank: {"turns": 1.0 + rank} for rank in range(3)}] * 3


def test_a_rank_alone_needs_no_store():
    """Catches a look-up of a store that is not there where nobody takes part."""
    assert times_of(0, [FakeChannel("alone", (0,))], {"turns": 2.0})() == {0: {"turns": 2.0}}


def test_a_rank_without_times_is_missed_within_the_limit(store):
    """Catches a wait for ever for a rank that left while strategies were tried."""
    (told,) = on_ranks(times_of(0, [FakeChannel("world", (0, 1))], {"turns": 1.0}))
    assert isinstance(told, WaitLimitError)
    assert "rank 1 to say how long its pairs took" in str(told)


def test_a_failure_elsewhere_ends_the_wait_for_times(store):
    """Catches a wait until the limit for a rank that has said that it failed."""
    channels = [[FakeChannel("world", (0, 1), limit_s=10.0)] for _ in range(2)]
    agreement.tell_failure(channels[1], 1, "forward strand at step 3", "KeyError: planted")
    begun = time.monotonic()
    (told,) = on_ranks(times_of(0, channels[0], {"turns": 1.0}))
    assert isinstance(told, BrokenGroupError)
    assert time.monotonic() - begun < 5
