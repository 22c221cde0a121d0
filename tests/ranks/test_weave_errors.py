"""Whatever fails, on every rank or on one: the right error on each, in time, no wrong data, no thread left."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import (
    Bomb,
    Cross,
    Pair,
    attempt,
    check_equal,
    check_pairs,
    chunk,
    copied,
    full,
    gradients,
    inputs,
    pair_of,
    planted,
    remake_group,
)
from operations import all_reduce, all_to_all_single, late_wait
from pool import Pool, RanksFailedError, join

import torchweave as tw
from torchweave.engine.pair import engine

LIMIT_S = 2.0
# how much later than the group's timeout an error may come, on a machine that does other things too
GRACE_S = 4.0
BOTH = ("turns", "streams")


class Scene:
    """Two chunks with a bomb between their crossings, and pairs of them.

    The bomb of the forward chunk goes off in the forward strand, that of the backward chunk in the backward strand.
    """

    def __init__(self, strategy, num_crossings=4, communicate=all_to_all_single):
        torch.manual_seed(3 + dist.get_rank())
        self.strategy = strategy
        self.bombs = {"forward": Bomb(), "backward": Bomb()}
        half = num_crossings // 2

        def block(bomb):
            return chunk(*(Cross(communicate) for _ in range(half)), bomb, *(Cross(communicate) for _ in range(half)))

        self.chunks = [block(self.bombs["forward"]), block(self.bombs["backward"])]
        self.pair = pair_of(*self.chunks)

    def arm(self, strands, go_off=planted):
        for strand in strands:
            self.bombs[strand].armed, self.bombs[strand].go_off = strand, go_off

    def disarm(self):
        for bomb in self.bombs.values():
            bomb.armed = ""

    def weave(self, step, strategy=None):
        made = self.pair(step)
        return self.weave_pair(made, strategy), made

    def weave_pair(self, made, strategy=None):
        return tw.weave(made.forward, made.backward, strategy=strategy or self.strategy, kind="scene")

    def check(self, step):
        """Weave a pair and raise unless it equals the plain run."""
        for module in self.chunks:
            module.zero_grad()
        output, made = self.weave(step)
        found = copied([output, made.results()])
        for module in self.chunks:
            module.zero_grad()
        plain = self.pair(step)
        plain.backward()
        check_equal(copied([plain.forward(), plain.results()]), found)

    def start(self):
        """Record the kind, and weave it once."""
        self.check(0)
        self.check(1)


def check_group_in_step():
    """Raise unless the default group still pairs the right operations."""
    for number in (1.0, 2.0, 3.0):
        x = full(3, value=number)
        dist.all_reduce(x)
        assert torch.equal(x, full(3, value=number * dist.get_world_size())), f"the group is out of step: {x}"


def timed_attempt(call):
    begin = time.monotonic()
    kind, text, trace = attempt(call)
    return kind, text if kind != "ok" else "", trace, time.monotonic() - begin


# ---- the same failure on every rank ----


def fail_alike(strategy, strands):
    scene = Scene(strategy)
    scene.start()
    made = scene.pair(2)
    scene.arm(strands)
    told = timed_attempt(lambda: scene.weave_pair(made))
    scene.disarm()
    check_group_in_step()
    scene.check(3)
    scene.check(4)
    return told


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("strands", [("forward",), ("backward",), ("forward", "backward")], ids="+".join)
def test_failing_alike_leaves_the_group_working(pool, strategy, strands):
    """Catches an error that is wrapped, swallowed or late, and a communicator that is out of step after it."""
    for kind, text, trace, seconds in pool.run(fail_alike, strategy, strands, group_timeout_s=LIMIT_S):
        assert (kind, text) == ("PlantedError", "planted here"), f"{kind}: {text}\n{trace}"
        assert "in go_off" in trace or "in planted" in trace, trace
        assert trace.count("PlantedError: planted here") >= len(strands), trace
        assert seconds < LIMIT_S, seconds


def fail_in_the_record(strategy, strands):
    scene = Scene(strategy)
    made = scene.pair(2)
    scene.arm(strands)
    told = timed_attempt(lambda: scene.weave_pair(made))
    scene.disarm()
    check_group_in_step()
    scene.start()
    return told


@pytest.mark.parametrize("strands", [("forward",), ("backward",), ("forward", "backward")], ids="+".join)
def test_failing_alike_in_the_first_pair_leaves_no_half_record(pool, strands):
    """Catches a record of half a strand that is taken for the whole."""
    for kind, _, trace, seconds in pool.run(fail_in_the_record, "turns", strands, group_timeout_s=LIMIT_S):
        assert kind == "PlantedError", trace
        assert seconds < LIMIT_S


# ---- a failure on one rank ----


def fail_alone(strategy, strand, rank):
    scene = Scene(strategy)
    scene.start()
    made = scene.pair(2)
    if dist.get_rank() == rank:
        scene.arm((strand,))
    told = timed_attempt(lambda: scene.weave_pair(made))
    scene.disarm()
    again = timed_attempt(lambda: scene.weave_pair(made))
    x = inputs(3, 0)
    new_kind = timed_attempt(lambda: tw.weave(lambda: scene.chunks[0](x), lambda: None, strategy=strategy))
    return told, again, new_kind


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("strand", ["forward", "backward"])
def test_one_rank_that_fails_alone_is_named_on_the_others(pool, strategy, strand):
    """Catches a hang, wrong data, or an error that does not say which rank and strand began."""
    told = pool.run(fail_alone, strategy, strand, 1, group_timeout_s=LIMIT_S)
    (kind0, text0, trace0, seconds0), *again0 = told[0]
    (kind1, _, trace1, seconds1), *again1 = told[1]
    assert kind1 == "PlantedError", trace1
    assert kind0 == "BrokenGroupError", trace0
    assert "rank 1" in text0, text0
    assert f"{strand} strand" in text0, text0
    assert "planted here" in text0, text0
    assert max(seconds0, seconds1) < LIMIT_S + GRACE_S, (seconds0, seconds1)
    for kind, _, trace, seconds in (*again0, *again1):
        assert kind == "BrokenGroupError", f"the broken group was used again: {kind}\n{trace}"
        assert seconds < 1.0


def fail_alone_in_the_record(rank):
    scene = Scene("turns")
    made = scene.pair(2)
    if dist.get_rank() == rank:
        scene.arm(("forward",))
    return timed_attempt(lambda: scene.weave_pair(made))


def test_one_rank_that_fails_alone_in_the_first_pair(pool):
    """Catches an agreement that waits for a rank that will never speak."""
    told = pool.run(fail_alone_in_the_record, 1, group_timeout_s=LIMIT_S)
    assert told[1][0] == "PlantedError", told[1][2]
    assert told[0][0] == "BrokenGroupError", told[0][2]
    assert "rank 1" in told[0][1], told[0][1]
    assert max(told[0][3], told[1][3]) < LIMIT_S + GRACE_S


def fail_alone_then_remake(strategy, when):
    scene = Scene(strategy)
    if when == "woven":
        scene.start()
    made = scene.pair(2)
    if dist.get_rank() == 1:
        if when == "after the last crossing":
            plain = made.forward
            made = made._replace(forward=lambda: (plain(), planted()))
        else:
            scene.arm(("forward",))
    told = timed_attempt(lambda: scene.weave_pair(made))
    scene.disarm()
    remake_group(LIMIT_S)
    for step in (3, 4, 5):
        scene.check(step)
    return told[0]


@pytest.mark.parametrize("when", ["record", "woven", "after the last crossing"])
def test_a_group_made_again_after_a_failure_works(pool, when):
    """Catches numbers of agreements or pairs that differ between ranks after one of them failed alone."""
    assert pool.run(fail_alone_then_remake, "turns", when, group_timeout_s=LIMIT_S) == [
        "BrokenGroupError",
        "PlantedError",
    ]


def remake_between_pairs():
    scene = Scene("turns")
    scene.start()
    remake_group(LIMIT_S)
    scene.start()
    scene.check(2)


def test_a_group_made_again_between_pairs_works(pool):
    """Catches a record that is followed on a group that is not there any more."""
    pool.run(remake_between_pairs)


# ---- deviation from the record ----

DEVIATIONS = {
    "one more": lambda: all_to_all_single(full(4, 6)),
    "another operation": lambda: all_reduce(full(4, 6)),
    "a region": lambda: region(),
    "object": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
}


def region():
    with tw.communication():
        pass


def deviate(strategy, strand, how, ranks):
    scene = Scene(strategy)
    scene.start()
    made = scene.pair(2)
    if dist.get_rank() in ranks:
        scene.arm((strand,), DEVIATIONS[how])
    errors = []

    def weave():
        try:
            scene.weave_pair(made)
        except tw.TorchweaveError as error:
            errors.append({name: str(value) for name, value in vars(error).items()})
            raise

    told = timed_attempt(weave)
    scene.disarm()
    if len(ranks) == dist.get_world_size():
        check_group_in_step()
        for step in (3, 4, 5):
            scene.check(step)
        return told, errors[0] if errors else {}
    return told, timed_attempt(lambda: scene.weave_pair(made._replace(backward=lambda: scene.chunks[0](inputs(4, 0)))))


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("strand", ["forward", "backward"])
@pytest.mark.parametrize("how", DEVIATIONS)
def test_a_deviation_on_all_ranks_sends_nothing_and_names_its_place(pool, strategy, strand, how):
    """Catches a crossing that no proof covers and is carried out all the same."""
    for rank, ((kind, text, trace, seconds), error) in enumerate(
        pool.run(deviate, strategy, strand, how, (0, 1), group_timeout_s=LIMIT_S)
    ):
        assert kind == "DeviationError", f"{kind}\n{trace}"
        assert (error["rank"], error["strand"]) == (str(rank), strand), text
        # one more of the very operation that comes next is no deviation yet: it is one at the strand's end
        assert error["crossing"] == ("8" if how == "one more" else "4"), text
        assert how == "one more" or error["expected"].startswith("all_to_all_single on"), text
        assert ("operations.py" in error["line"]) or ("test_weave_errors.py" in error["line"]), text
        assert seconds < LIMIT_S + GRACE_S


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("how", ["one more", "another operation", "a region"])
def test_a_deviation_on_one_rank_is_told_on_both(pool, strategy, how):
    """Catches data that is exchanged with the wrong partner because one rank has one crossing more (facts.md)."""
    told = pool.run(deviate, strategy, "forward", how, (0,), group_timeout_s=LIMIT_S)
    assert told[0][0][0] == "DeviationError", told[0][0][2]
    # what rank 0 sends too much may pair with rank 1's last operation; then rank 1 learns of it in its next pair
    there = told[1][1] if how == "one more" and told[1][0][0] == "ok" else told[1][0]
    assert there[0] == "BrokenGroupError", there
    assert "rank 0" in there[1], there[1]
    assert max(one[0][3] for one in told) < LIMIT_S + GRACE_S
    assert told[0][1][0] == "BrokenGroupError", told[0][1]


def weave_with_switch(strategy, lacking):
    switch = {"on": False}
    parts = [Cross(all_to_all_single) for _ in range(4)]
    forward_chunk, backward_chunk = chunk(*parts), chunk(Cross(all_to_all_single), Cross(late_wait))
    tail = Cross(all_to_all_single)

    def pair(step):
        made = pair_of(forward_chunk, backward_chunk)(step)
        x = inputs(step, 4)

        def forward():
            y = made.forward()
            return y if switch["on"] else (y, tail(x))

        return Pair(forward, made.backward, made.results)

    def weave(step):
        made = pair(step)
        return tw.weave(made.forward, made.backward, strategy=strategy, kind="switch")

    weave(0)
    weave(1)
    switch["on"] = dist.get_rank() in lacking
    told = timed_attempt(lambda: weave(2))
    switch["on"] = False
    if len(lacking) == dist.get_world_size():
        check_group_in_step()
        weave(3)
        weave(4)
        check_group_in_step()
    return told


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("lacking", [(0, 1), (0,)], ids=str)
def test_a_strand_that_ends_early(pool, strategy, lacking):
    """Catches a record that is longer than the strand and is not compared at its end."""
    told = pool.run(weave_with_switch, strategy, lacking, group_timeout_s=LIMIT_S)
    for rank, (kind, text, trace, seconds) in enumerate(told):
        assert kind == ("DeviationError" if rank in lacking else "BrokenGroupError"), f"{kind}: {text}\n{trace}"
        assert seconds < LIMIT_S + GRACE_S


def _reduce_on(group, x):
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


def lone_group_appears(strategy):
    """facts.md's case: after the record, rank 0's forward has one more collective, on a group of its own."""
    lone = dist.new_subgroups(1)[0]
    scene = Scene(strategy)
    scene.start()
    if dist.get_rank() == 0:
        scene.arm(("forward",), lambda: _reduce_on(lone, full(3)))
    scene.check(2)
    scene.check(3)
    scene.disarm()
    scene.check(4)


@pytest.mark.parametrize("strategy", BOTH)
def test_a_collective_on_a_group_of_one_changes_no_turn(pool, strategy):
    """Catches the silent corruption that facts.md has: a turn on one rank that the other does not take."""
    pool.run(lone_group_appears, strategy)


def small_group_appears(strategy, when):
    """Four ranks; in the forwards of 0 and 1 alone comes a collective on a group of these two."""
    small = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    scene = Scene(strategy)
    if when == "later":
        scene.start()
    if dist.get_rank() < 2:
        scene.arm(("forward",), lambda: _reduce_on(small, torch.ones(3)))
    return [timed_attempt(lambda: scene.check(step)) for step in ((2, 3) if when == "first" else (2,))]


@pytest.mark.parametrize("strategy", [*BOTH, "auto"])
def test_ranks_whose_first_records_differ(pool4, strategy):
    """Catches orders that do not fit together and are woven: must be serial or refused, on all ranks alike."""
    told = pool4.run(small_group_appears, strategy, "first", group_timeout_s=LIMIT_S)
    allowed = {"ok"} if strategy == "auto" else {"ok", "NotWeavableError"}
    for pairs in told:
        for kind, _, trace, _ in pairs:
            assert kind in allowed, trace
    for pairs in zip(*told, strict=True):
        assert len({pair[0] for pair in pairs}) == 1, f"ranks do not decide alike: {[pair[0] for pair in pairs]}"


@pytest.mark.parametrize("strategy", BOTH)
def test_a_small_group_that_appears_later(pool4, strategy):
    """Catches wrong data on the ranks that do not deviate themselves."""
    told = pool4.run(small_group_appears, strategy, "later", group_timeout_s=LIMIT_S)
    for rank, [(kind, text, trace, seconds)] in enumerate(told):
        assert kind == ("DeviationError" if rank < 2 else "BrokenGroupError"), f"rank {rank}: {kind}: {text}\n{trace}"
        assert seconds < LIMIT_S + GRACE_S


def late_on_one_rank(x):
    """Ranks issue the same operations in the same order, but wait at other places."""
    y, z = x.clone(), x.sin()
    first = dist.all_reduce(y, async_op=True)
    if dist.get_rank() == 0:
        second = dist.all_reduce(z, async_op=True)
        first.wait()
    else:
        first.wait()
        second = dist.all_reduce(z, async_op=True)
    second.wait()
    return y + 2 * z


def check_late_on_one_rank(strategy, way):
    check_pairs(lambda: pair_of(chunk(Cross(late_on_one_rank)), chunk(Cross(late_on_one_rank))), strategy, way)


@pytest.mark.parametrize(("strategy", "way"), [("turns", "refused"), ("streams", "refused"), ("auto", "serial")])
def test_ranks_that_wait_at_other_places_are_not_woven(pool, strategy, way):
    """Catches a proof that compares operations and forgets the waits, at which the turns are taken."""
    pool.run(check_late_on_one_rank, strategy, way)


def new_kind_on_rank_0(strategy):
    """A common habit: in some step, rank 0 runs other callables (it logs, say) that communicate just the same."""
    scene = Scene(strategy)

    def weave(step, kind):
        made = scene.pair(step)
        for module in scene.chunks:
            module.zero_grad()
        output = tw.weave(made.forward, made.backward, strategy=strategy, kind=kind)
        return copied([output, made.results()])

    def plain(step):
        for module in scene.chunks:
            module.zero_grad()
        made = scene.pair(step)
        made.backward()
        return copied([made.forward(), made.results()])

    expected = plain(2)
    weave(0, "usual")
    weave(1, "usual")
    told = attempt(lambda: check_equal(expected, weave(2, "logging" if dist.get_rank() == 0 else "usual")))
    return told[0], told[1][:300]


@pytest.mark.parametrize("strategy", BOTH)
def test_a_kind_that_is_new_on_one_rank_alone(pool, strategy):
    """Catches one rank that records (backward, then forward) while the other weaves: they exchange wrong data."""
    told = pool.run(new_kind_on_rank_0, strategy, group_timeout_s=LIMIT_S)
    for rank, (kind, text) in enumerate(told):
        assert kind in ("ok", "BrokenGroupError", "WaitLimitError", "DeviationError"), f"rank {rank}: {kind}: {text}"


# ---- threads, interrupts ----


def weave_twice_at_once():
    scene = Scene("turns")
    scene.start()
    made = scene.pair(2)
    told = []

    def second():
        told.append(timed_attempt(lambda: tw.weave(lambda: 1, lambda: None)))

    def forward():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        return made.forward()

    tw.weave(forward, made.backward, strategy="turns", kind="outer")
    scene.check(3)
    return told[0]


def test_two_weaves_at_once_from_two_threads(pool):
    """Catches two pairs whose turns get mixed up: the second is told what to do."""
    for kind, text, trace, _ in pool.run(weave_twice_at_once):
        assert kind == "UsageError", trace
        assert "Remedy" in text


def busy_thread_meanwhile(strategy):
    other = dist.new_group()
    scene = Scene(strategy)
    scene.start()
    troubles, num_rounds = [], [0]

    def work():
        for number in range(200):
            x = torch.full((5,), float(number))
            dist.all_reduce(x, group=other)
            if not torch.equal(x, torch.full((5,), 2.0 * number)):
                troubles.append(x)
            num_rounds[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    for step in range(2, 8):
        scene.check(step)
    thread.join()
    assert not troubles
    return num_rounds[0]


@pytest.mark.parametrize("strategy", BOTH)
def test_an_unrelated_thread_uses_its_own_group_meanwhile(pool, strategy):
    """Catches a thread that is taken for a strand, or collectives of it that are counted as crossings."""
    assert pool.run(busy_thread_meanwhile, strategy) == [200, 200]


def ctrl_c():
    """What a terminal does: it signals the process, and Python's main thread raises."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def interrupt(strategy, strand, ranks):
    scene = Scene(strategy)
    scene.start()
    made = scene.pair(2)
    if dist.get_rank() in ranks:
        scene.arm((strand,), ctrl_c)
    told = timed_attempt(lambda: scene.weave_pair(made))
    scene.disarm()
    if len(ranks) == dist.get_world_size() and strand == "forward":
        check_group_in_step()
        scene.check(3)
    return told, [g is not None for g in gradients(scene.chunks[1])]


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("strand", ["forward", "backward"])
def test_ctrl_c_on_every_rank_is_raised_after_the_other_strand(pool, strategy, strand):
    """Catches a Ctrl-C that is lost, that hangs, or that leaves the backward in its middle."""
    for (kind, text, trace, seconds), gradients_are_there in pool.run(
        interrupt, strategy, strand, (0, 1), group_timeout_s=LIMIT_S
    ):
        assert kind == "KeyboardInterrupt" or (strand == "backward" and kind == "BrokenGroupError"), (
            f"{kind}: {text}\n{trace}"
        )
        assert all(gradients_are_there) or kind != "KeyboardInterrupt" or strand == "backward"
        assert seconds < LIMIT_S + GRACE_S


def test_ctrl_c_on_one_rank_is_told_on_the_other(pool):
    """Catches a rank that waits for ever for one that was interrupted."""
    told = pool.run(interrupt, "turns", "forward", (1,), group_timeout_s=LIMIT_S)
    assert told[1][0][0] == "KeyboardInterrupt", told[1][0][2]
    assert told[0][0][0] == "BrokenGroupError", told[0][0][2]
    assert max(one[0][3] for one in told) < LIMIT_S + GRACE_S


def interrupt_twice():
    """The backward hangs where no turn and no communication is; Ctrl-C comes twice."""
    scene = Scene("turns")
    scene.start()
    asleep, wake = threading.Event(), threading.Event()
    plain = scene.pair(2)

    def backward():
        plain.backward()
        asleep.set()
        wake.wait(20)

    def again():
        asleep.wait(10)
        for _ in range(2):
            time.sleep(1.0)
            ctrl_c()

    scene_kind = {"kind": "twice"}
    for step in (3, 4):
        made = scene.pair(step)
        tw.weave(made.forward, made.backward, strategy="turns", **scene_kind)
    threading.Thread(target=again).start()
    told = timed_attempt(lambda: tw.weave(plain.forward, backward, strategy="turns", **scene_kind))
    wake.set()
    return told


def test_a_second_ctrl_c_gives_up(pool):
    """Catches a Ctrl-C that cannot be had while the other strand hangs."""
    for kind, _, trace, seconds in pool.run(interrupt_twice, group_timeout_s=15.0):
        assert kind == "KeyboardInterrupt", trace
        assert seconds < 8.0, seconds


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tw.weave(3, lambda: None), ("forward", "int", "Remedy")),
        (lambda: tw.weave(lambda: None, torch.ones(1)), ("backward", "a tensor of shape (1,)", "Remedy")),
        (lambda: tw.weave(lambda: 1, lambda: None, strategy="fast"), ("strategy", "'fast'", "turns", "Remedy")),
        (lambda: tw.weave(lambda: 1, lambda: None, kind=[1]), ("kind", "hashable", "Remedy")),
        (lambda: tw.weave(lambda: 1, lambda: None, strategy=None), ("strategy", "None", "Remedy")),
        (lambda: tw.weave(lambda: 1, lambda: None, strategy=["turns"]), ("strategy", "Remedy")),
    ],
    ids=["forward", "backward", "strategy", "kind", "strategy None", "strategy list"],
)
def test_bad_input_is_told_with_rule_and_remedy(call, words):
    """Catches a bare TypeError from the depths for a user's slip."""
    from torchweave.errors import UsageError

    with pytest.raises(UsageError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def weave_without_group():
    dist.destroy_process_group()
    told = [
        timed_attempt(lambda: tw.weave(lambda: 5, lambda: None, strategy=strategy))
        for strategy in ("turns", "auto", "turns")
    ]
    x = torch.ones(3)
    told.append(timed_attempt(lambda: tw.weave(lambda: dist.all_reduce(x), lambda: None)))
    return told


def test_without_a_process_group(pool):
    """Catches a need for a process group where nothing is communicated, and a bare error where it is."""
    for *fine, (kind, text, trace, _) in pool.run(weave_without_group):
        assert [one[0] for one in fine] == ["ok"] * 3, fine
        assert kind in ("ValueError", "UsageError"), trace
        assert "init" in text


# ---- a rank that dies ----


def die(path, rank, strategy, own_store):
    if own_store:
        # the store lives in rank 0, as under torchrun without an agent: it may be what dies
        port = int(path.rpartition("-")[2])
        size, me = dist.get_world_size(), dist.get_rank()
        dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", port, size, me == 0, datetime.timedelta(seconds=10))
        join(store, me, size, LIMIT_S)
    scene = Scene(strategy)
    scene.start()
    made = scene.pair(2)
    if dist.get_rank() == rank:
        scene.arm(("forward",), lambda: os._exit(9))
    kind, text, trace, seconds = timed_attempt(lambda: scene.weave_pair(made))
    Path(path).write_text(f"{kind}\n{seconds}\n{text}\n{trace}")


def _free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("strategy", "rank", "own_store"),
    [("turns", 1, False), ("streams", 1, False), ("turns", 0, True)],
    ids=["turns", "streams", "the store's host"],
)
def test_a_rank_that_is_killed(tmp_path, strategy, rank, own_store):
    """Catches a wait that has no limit when the other end is not there any more."""
    path = tmp_path / f"told-{_free_port()}"
    pool = Pool(2)
    try:
        with pytest.raises(RanksFailedError, match="exit code 9"):
            pool.run(die, str(path), rank, strategy, own_store, group_timeout_s=LIMIT_S, timeout=40)
    finally:
        pool.close()
    kind, seconds, text = path.read_text().split("\n", 2)
    assert kind == "BrokenGroupError", text
    assert float(seconds) < LIMIT_S + GRACE_S


def nothing_is_left():
    scene = Scene("turns")
    scene.start()
    scene.weave(2)
    assert engine().interception.current() is None
    return [t.name for t in threading.enumerate()]


def test_no_thread_is_left_after_a_pair(pool):
    """Catches a worker thread that outlives its pair."""
    for names in pool.run(nothing_is_left):
        assert not [name for name in names if name.startswith("torchweave")], names
