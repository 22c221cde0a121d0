"""Races: happens-before over hand-written logs, and random ones compared with a plain search through a graph."""

from __future__ import annotations

import random

import pytest
from story import Story

from torchweave.diagnose.races import races
from torchweave.trace.log import (
    COLLECTIVES,
    OP,
    RECORD,
    SYNC_DEVICE,
    SYNC_EVENT,
    SYNC_STREAM,
    UNSEEN,
    WAIT,
    WRITTEN,
)

A, B, C = 21, 25, 29


def found(story):
    return [(race.first, race.second, race.freed) for race in races(story.log)]


def test_a_result_used_on_another_stream_without_a_wait():
    """Catches a race that is not found at all."""
    story = Story()
    first = story.op(A, writes=[0])
    second = story.op(B, reads=[0], writes=[1])
    assert found(story) == [(first, second, False)]


def test_reading_the_same_memory_on_two_streams_is_none():
    story = Story()
    story.op(A, reads=[0])
    story.op(B, reads=[0])
    assert found(story) == []


def test_writing_what_another_stream_still_reads_is_one():
    """Catches an analysis that knows of reads after writes only."""
    story = Story()
    first = story.op(A, reads=[0])
    second = story.op(B, writes=[0])
    assert found(story) == [(first, second, False)]


@pytest.mark.parametrize(
    "order",
    [
        lambda story: story.wait_stream(B, A),
        lambda story: story.synchronize(),
        lambda story: story.synchronize_stream(A),
        lambda story: story.driver_free(),
        lambda story: (story.record(1, A), story.synchronize_event(1)),
        lambda story: (story.wait_stream(C, A), story.wait_stream(B, C)),
        lambda story: (story.record(1, A), story.op(A, writes=[5]), story.wait(1, B)),
        lambda story: story.join(B, A),
        lambda story: story.wait(UNSEEN, B),
    ],
)
def test_what_orders_two_streams(order):
    """Catches each way of ordering that is taken for none: a false alarm."""
    story = Story()
    story.op(A, writes=[0])
    order(story)
    story.op(B, reads=[0])
    assert found(story) == []


@pytest.mark.parametrize(
    "order",
    [
        lambda story: story.wait_stream(A, B),
        lambda story: story.wait_stream(B, C),
        lambda story: story.synchronize_stream(B),
        lambda story: story.record(1, A),
        lambda story: story.wait(77, B),
        lambda story: (story.record(1, B), story.wait(1, B)),
        lambda story: story.join(A, B),
    ],
)
def test_what_does_not(order):
    """Catches orders that are believed in the wrong direction, for the wrong stream, or of an unknown event."""
    story = Story()
    story.op(A, writes=[0])
    order(story)
    story.op(B, reads=[0])
    assert len(found(story)) == 1


def test_an_event_holds_what_was_asked_before_its_record_only():
    story = Story()
    story.record(1, A)
    story.op(A, writes=[0])
    story.wait(1, B)
    story.op(B, reads=[0])
    assert len(found(story)) == 1


def test_a_wait_holds_what_is_asked_after_it_only():
    story = Story()
    story.op(A, writes=[0])
    story.op(B, reads=[0])
    story.wait_stream(B, A)
    assert len(found(story)) == 1


def test_an_event_recorded_again_stands_for_the_later_record():
    story = Story()
    story.record(1, A)
    story.op(A, writes=[0])
    story.record(1, A)
    story.wait(1, B)
    story.op(B, reads=[0])
    assert found(story) == []


def test_a_wait_of_a_stream_for_itself_is_named():
    """Catches a report that blames the use, and not the wait that was meant to protect it."""
    story = Story()
    story.op(A, writes=[0])
    story.record(1, B)
    wait = story.wait(1, B)
    story.op(B, reads=[0])
    (race,) = races(story.log)
    assert race.own_wait == wait


def test_an_own_wait_before_the_earlier_use_is_not_to_blame():
    story = Story()
    story.record(1, B)
    story.wait(1, B)
    story.op(A, writes=[0])
    story.op(B, reads=[0])
    (race,) = races(story.log)
    assert race.own_wait == -1


def test_halves_of_one_buffer_are_two_memories():
    """Catches an analysis by allocation: views that do not meet are no race."""
    story = Story()
    story.op(A, writes=[(0, 0, 500)])
    story.op(B, writes=[(0, 500, 1000)])
    assert found(story) == []
    story.op(C, writes=[(0, 499, 501)])
    assert len(found(story)) == 2


def test_columns_that_interleave_are_no_race_unless_they_share_their_first_byte():
    story = Story()
    story.op(A, writes=[(0, 0, 900, False)])
    story.op(B, writes=[(0, 4, 904, False)])
    assert found(story) == []
    story.op(C, writes=[(0, 0, 904, False)])
    assert len(found(story)) == 1


def test_a_view_with_holes_inside_a_dense_one_meets_it():
    story = Story()
    story.op(A, writes=[(0, 0, 1000)])
    story.op(B, reads=[(0, 4, 904, False)])
    assert len(found(story)) == 1


def test_memory_given_out_again_while_another_stream_uses_it():
    """Catches the race that `record_stream` is there for."""
    story = Story()
    story.allocate(0, A)
    story.op(A, writes=[0])
    story.wait_stream(B, A)
    first = story.op(B, reads=[0])
    story.allocate(0, A)
    second = story.op(A, writes=[0])
    assert found(story) == [(first, second, True)]


@pytest.mark.parametrize(
    "mend",
    [lambda story: story.keep(0, B), lambda story: story.wait_stream(A, B), lambda story: story.synchronize()],
)
def test_what_keeps_freed_memory_safe(mend):
    """Catches a false alarm about `record_stream`, a later wait, and a synchronization."""
    story = Story()
    story.allocate(0, A)
    story.op(A, writes=[0])
    story.wait_stream(B, A)
    story.op(B, reads=[0])
    mend(story)
    story.allocate(0, A)
    story.op(A, writes=[0])
    assert found(story) == []


def test_memory_given_out_again_on_its_own_stream_is_ordered_by_it():
    story = Story()
    story.allocate(0, A)
    story.op(A, writes=[0])
    story.allocate(0, A)
    story.op(A, writes=[0])
    assert found(story) == []


def test_memory_that_went_back_to_the_driver_has_no_past():
    story = Story()
    story.allocate(0, A)
    story.op(B, reads=[0])
    story.driver_free()
    story.allocate(0, C)
    story.op(C, writes=[0])
    assert found(story) == []


def test_memory_whose_making_nobody_saw_is_no_earlier_block():
    """Catches memory from before the log taken for memory of the stream that it is first used on."""
    story = Story()
    story.op(B, reads=[0])
    story.allocate(0, A)
    story.op(A, writes=[0])
    assert found(story) == []


@pytest.mark.parametrize("waits", [False, True])
def test_a_collective_runs_apart_until_its_work_is_waited_for(waits):
    """Catches collectives that are taken to run on the caller's stream: a missing `work.wait()` would not show."""
    story = Story()
    story.op(A, writes=[0])
    first = story.collective(A, reads=[0], writes=[0])
    if waits:
        story.join(A, COLLECTIVES)
    second = story.op(A, reads=[0])
    assert found(story) == ([] if waits else [(first, second, False)])


def test_what_a_collective_uses_is_kept_until_it_is_done():
    """Catches a false alarm about a tensor that is let go while a collective has it: torch holds it, or its memory."""
    story = Story()
    story.allocate(0, A)
    story.op(A, writes=[0])
    story.collective(A, reads=[0])
    story.allocate(0, A)
    story.op(A, writes=[0])
    assert found(story) == []


def test_a_backward_across_two_streams_is_ordered_by_autograd():
    """Catches false alarms about what autograd orders in C++: between nodes, from the caller, and back to it."""
    story = Story()
    story.op(C, writes=[0])  # the loss's own gradient
    story.backward(C)
    story.op(A, reads=[0], writes=[1], task=7)
    story.op(B, reads=[1], writes=[2], task=7)
    story.op(A, reads=[2], writes=[3], task=7)
    story.backward_end(C)
    story.op(C, reads=[3])
    assert found(story) == []


def test_a_gradient_from_outside_of_a_backward_is_not():
    """Catches an order that a backward's begin would make with all streams."""
    story = Story()
    story.op(A, writes=[0])
    first = story.op(A, writes=[1])
    story.backward(B)
    second = story.op(B, reads=[1], task=7)
    story.backward_end(B)
    assert found(story) == [(first, second, False)]


def test_the_end_of_a_backward_orders_the_callers_stream_alone():
    story = Story()
    story.backward(A)
    first = story.op(A, writes=[0], task=7)
    story.backward_end(A)
    second = story.op(B, reads=[0])
    assert found(story) == [(first, second, False)]


def test_two_backwards_are_not_ordered_with_each_other():
    """Catches one order for all of autograd: two microbatches that add to one gradient on two streams race."""
    story = Story()
    story.backward(A, 0)
    first = story.op(A, writes=[0], task=7)
    story.backward_end(A, 0)
    story.backward(B, 1)
    second = story.op(B, writes=[0], task=8)
    story.backward_end(B, 1)
    assert found(story) == [(first, second, False)]


@pytest.mark.parametrize("begun", [False, True])
def test_a_backward_of_which_the_log_has_a_part_makes_no_race(begun):
    """Catches false alarms where the log began or ended in the middle of one, as another thread's step may let it."""
    story = Story()
    story.op(C, writes=[0])
    if begun:
        story.backward(C, 3)
    story.op(A, reads=[0], writes=[1], task=7)
    story.backward_end(B if not begun else C, 3)
    story.op(C if begun else B, reads=[1])
    assert found(story) == []


def test_a_wait_within_a_backward_counts_for_all_that_follows_in_it():
    """Catches a false alarm about a hook that waits on its own stream, for a node on another."""
    story = Story()
    story.backward(A)
    story.op(A, writes=[0], task=7)
    story.collective(A, reads=[0], writes=[0], task=7)
    story.join(A, COLLECTIVES, task=7)
    story.op(B, reads=[0], task=7)
    story.backward_end(A)
    assert found(story) == []


def test_a_collective_of_a_hook_that_nobody_waits_for_is_found():
    """Catches an end of backward that is taken to wait for collectives too."""
    story = Story()
    story.backward(A)
    story.op(A, writes=[0], task=7)
    first = story.collective(A, reads=[0], writes=[0], task=7)
    story.backward_end(A)
    second = story.op(A, reads=[0])
    assert found(story) == [(first, second, False)]


def test_what_a_backward_used_is_kept_by_autograd():
    """Catches a false alarm about gradients that autograd hands from stream to stream, and keeps as `record_stream`."""
    story = Story()
    story.backward(B)
    story.allocate(0, A)
    story.op(A, writes=[0], task=7)
    story.op(B, reads=[0], task=7)
    story.backward_end(B)
    story.allocate(0, A)
    story.op(A, writes=[0])
    assert found(story) == []


def test_a_stream_that_nobody_saw_being_made_makes_no_race():
    """Catches false alarms about `torch.Stream`, whose waits are C: what waits for what is not known."""
    story = Story(streams=(A, B))
    story.op(A, writes=[0])
    story.op(C, reads=[0], writes=[1])
    story.op(B, reads=[0, 1])
    assert found(story) == []


def test_streams_of_others_are_ordered_by_the_default_stream():
    """Catches a false alarm about blocking streams, which the default stream orders by itself."""
    story = Story()
    story.log.streams.external[story.log.streams.pointer.index(A)] = 1
    story.op(A, writes=[0])
    story.op(0, reads=[0])
    assert found(story) == []
    story.op(B, writes=[0])
    assert len(found(story)) == 2


def test_what_repeats_in_a_loop_is_told_once():
    story = Story()
    for _ in range(5):
        story.op(A, writes=[0])
        story.op(B, reads=[0])
    for row in range(len(story.log.events)):
        story.log.events.place[row] = row % 2
    assert len(found(story)) == 2  # the read after the write, and the next write after the read


def test_what_began_before_the_log_is_not_known():
    story = Story()
    story.wait(1, B)
    story.op(B, reads=[0])
    story.allocate(3, A)
    assert found(story) == []


def random_story(seed):
    chance = random.Random(seed)
    streams, memories, events = [0, A, B, C][: chance.randint(2, 4)], range(chance.randint(1, 4)), range(3)
    story = Story()
    for _ in range(chance.randint(2, 40)):
        what = chance.choice(["op", "op", "op", "record", "wait", "wait_stream", "device", "stream", "event"])
        stream = chance.choice(streams)
        if what == "op":

            def some():
                low = chance.choice([0, 0, 250, 500])
                return [
                    (chance.choice(memories), low, low + chance.choice([100, 500, 1000]))
                    for _ in range(chance.randint(0, 2))
                ]

            story.op(stream, reads=some(), writes=some())
        elif what == "record":
            story.record(chance.choice(events), stream)
        elif what == "wait":
            story.wait(chance.choice(events), stream)
        elif what == "wait_stream":
            story.wait_stream(stream, chance.choice(streams))
        elif chance.random() < 0.2:
            {"device": story.synchronize, "stream": lambda s=stream: story.synchronize_stream(s),
             "event": lambda: story.synchronize_event(chance.choice(events))}[what]()  # fmt: skip
    return story


def searched(log):
    """Return the racing pairs of memory accesses by plain search in a graph of all that is asked."""
    events = log.events
    size = len(events)
    after = [set() for _ in range(size)]  # what each comes after, directly
    last_of, recorded, host = {}, {}, []
    for row in range(size):
        kind, a, b = events.kind[row], events.a[row], events.b[row]
        stream = {OP: a, RECORD: b, WAIT: b}.get(kind)
        if stream is not None:
            # everything asked comes after what the host has waited for
            after[row] |= set(host)
            if stream in last_of:
                after[row].add(last_of[stream])
            if kind == WAIT and a in recorded:
                after[row].add(recorded[a])
            if kind == RECORD:
                recorded[a] = row
            last_of[stream] = row
        elif kind == SYNC_DEVICE:
            host += list(last_of.values())
        elif kind == SYNC_STREAM and a in last_of:
            host.append(last_of[a])
        elif kind == SYNC_EVENT and a in recorded:
            host.append(recorded[a])
    reach = [set() for _ in range(size)]
    for row in range(size):
        for before in after[row]:
            reach[row] |= {before} | reach[before]
    uses = []
    for row in range(size):
        if events.kind[row] == OP:
            operator = events.b[row]
            first = log.operators.first
            end = first[operator + 1] if operator + 1 < len(first) else len(log.accesses)
            for at in range(first[operator], end):
                uses.append((row, log.accesses.low[at], log.accesses.high[at], log.accesses.flags[at] & WRITTEN))
    pairs = set()
    for row, low, high, writes in uses:
        for other, start, stop, wrote in uses:
            if other < row and low < stop and start < high and (writes or wrote) and other not in reach[row]:
                pairs.add((other, row))
    return pairs


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_random_programs_against_plain_search(start):
    """Catches any difference between vector clocks and reachability: a false alarm, or a use whose race is missed."""
    seen = 0
    for seed in range(start, start + 100):
        story = random_story(seed)
        mine = {(race.first, race.second) for race in races(story.log)}
        pairs = searched(story.log)
        assert mine <= pairs, seed
        # of several earlier uses that one later use races with, those behind another one need no telling
        assert {second for _, second in mine} == {second for _, second in pairs}, seed
        seen += bool(pairs)
    assert 20 < seen < 100, "the programs have to be of both kinds"


@pytest.mark.long
def test_many_random_programs_against_plain_search():
    for seed in range(10_000, 30_000):
        story = random_story(seed)
        mine = {(race.first, race.second) for race in races(story.log)}
        pairs = searched(story.log)
        assert mine <= pairs, seed
        assert {second for _, second in mine} == {second for _, second in pairs}, seed
