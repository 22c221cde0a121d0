"""It overlaps: asserted on the times at which communication and computation began and ended, never on wall time."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from harness import Cross, chunk, pair_of

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.intervals import intersection, length, union

BOTH = ("turns", "streams")
REGION_S = 0.03
SPIN_S = 0.006


class Recorder:
    """Times of what ran, by what it was, ns."""

    def __init__(self):
        self.times = {}

    def run(self, name, body):
        begin = time.perf_counter_ns()
        result = body()
        self.times.setdefault(name, []).append((begin, time.perf_counter_ns()))
        return result

    def spin(self, strand):
        """Compute on the host, for a while that a sleep cannot be taken for."""

        def body():
            end = time.perf_counter() + SPIN_S
            while time.perf_counter() < end:
                torch.ones(8).sum()

        def spin(x):
            self.run(f"{strand} computes", body)
            return x.clone()

        return spin

    def slow_region(self, strand):
        """Communication that takes long and costs no processor."""

        def body():
            with tw.communication():
                self.run(f"{strand} communicates", lambda: time.sleep(REGION_S))

        def communicate(x):
            body()
            return x.clone()

        return communicate


def run_regions(strategy):
    """Each strand: compute, communicate, three times. Return all times of the third pair, and the log's spans."""
    recorder = Recorder()
    names = ("forward", "backward")
    chunks = {}
    # the backward's chunk has its parts recorded as `backward` while its own forward runs too: cleared below
    for name in names:
        parts = []
        for _ in range(3):
            parts += [Cross(recorder.spin(name)), Cross(recorder.slow_region(name))]
        chunks[name] = chunk(*parts)
    pair = pair_of(chunks["forward"], chunks["backward"])
    for step in range(3):
        made = pair(step)
        recorder.times.clear()
        with engine().observe() as log:
            tw.weave(made.forward, made.backward, strategy=strategy)
    return recorder.times, [tuple(span) for span in log.spans]


def hidden(times, strand, other):
    return length(intersection(union(times[f"{strand} communicates"]), union(times[f"{other} computes"])))


def test_each_strand_computes_while_the_other_communicates(pool):
    """Catches a weave that is right and hides nothing."""
    for times, _ in pool.run(run_regions, "turns"):
        assert len(times["forward computes"]) == len(times["backward computes"]) == 3
        total = length(union(times["forward computes"]))
        # the backward begins, and with a communication: all the forward's computation fits behind it
        assert hidden(times, "backward", "forward") > 0.6 * total, times
        total = length(union(times["backward computes"]))
        assert hidden(times, "forward", "backward") > 0.3 * total, times


def busy(times, strand):
    return union([*times[f"{strand} computes"], *times[f"{strand} communicates"]])


def test_free_strands_are_busy_at_the_same_time(pool):
    """Catches free strands of which one waits for the other; what meets what is theirs to choose."""
    for times, _ in pool.run(run_regions, "streams"):
        forward, backward = busy(times, "forward"), busy(times, "backward")
        shorter = min(length(forward), length(backward))
        assert length(intersection(forward, backward)) > 0.6 * shorter, times


def test_a_serial_pair_hides_nothing(pool):
    """Catches a measure of overlap that is above zero whatever ran."""
    for times, _ in pool.run(run_regions, "serial"):
        assert hidden(times, "backward", "forward") == 0
        assert hidden(times, "forward", "backward") == 0


def test_turns_never_compute_at_once(pool):
    """Catches a baton that two strands hold: under `turns` the computation of the strands never overlaps."""
    for times, spans in pool.run(run_regions, "turns"):
        both = intersection(union(times["forward computes"]), union(times["backward computes"]))
        assert length(both) == 0, times
        computing = {
            name: union([span[2:] for span in spans if span[:2] == (name, "compute")])
            for name in ("forward", "backward")
        }
        assert length(intersection(computing["forward"], computing["backward"])) == 0, spans


def test_the_log_and_the_times_of_the_user_agree(pool):
    """Catches spans that call a strand computing while it was away."""
    for times, spans in pool.run(run_regions, "turns"):
        for name in ("forward", "backward"):
            computing = union([span[2:] for span in spans if span[:2] == (name, "compute")])
            users = union(times[f"{name} computes"])
            assert length(intersection(computing, users)) == length(users), (times, spans)
            assert length(intersection(computing, union(times[f"{name} communicates"]))) < 0.2e9 * REGION_S, (
                times,
                spans,
            )


def run_late_peer(strategy):
    """Rank 1's backward comes late to its all_reduce, by a sleep; what does rank 0's forward do meanwhile?"""
    recorder = Recorder()
    late = {"s": 0.0}

    def all_reduce(x):
        if dist.get_rank() == 1:
            time.sleep(late["s"])
        return recorder.run("backward communicates", lambda: _all_reduce(x))

    def quick(x):
        return _all_reduce(x)

    forward_chunk = chunk(*(Cross(f) for _ in range(2) for f in (recorder.spin("forward"), quick)))
    pair = pair_of(forward_chunk, chunk(Cross(all_reduce)))
    for step in range(3):
        late["s"] = 0.0
        made = pair(step)
        dist.barrier()
        recorder.times.clear()
        late["s"] = 0.1
        with engine().observe() as log:
            tw.weave(made.forward, made.backward, strategy=strategy)
    return recorder.times, [tuple(span) for span in log.spans]


def _all_reduce(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


@pytest.mark.parametrize("strategy", BOTH)
def test_the_forward_computes_while_an_all_reduce_waits_for_a_late_peer(pool, strategy):
    """Catches a synchronous collective that holds its strand's turn until it has ended."""
    times, spans = pool.run(run_late_peer, strategy)[0]
    (begin, end) = times["backward communicates"][0]
    assert end - begin > 0.05e9, "the peer was not late: nothing is shown by this run"
    first = times["forward computes"][0]
    # free strands need not wait for the backward's first operation, so there it may have begun, and ended, earlier
    assert begin <= first[0] or strategy == "streams", (times, spans)
    assert first[1] <= end, (times, spans)
    waits = [span for span in spans if span[:2] == ("backward", "wait")]
    assert any(begin <= span[2] <= span[3] <= end for span in waits), (times, spans)


@pytest.mark.parametrize("strategy", ["serial"])
def test_serially_the_forward_begins_after_the_late_peer(pool, strategy):
    """Catches a shape of test that would call anything overlap."""
    times, _ = pool.run(run_late_peer, strategy)[0]
    assert times["forward computes"][0][0] >= times["backward communicates"][0][1]


def run_asynchronous(strategy):
    """The backward starts its all_reduce, computes, and waits: its own computation must not be a turn's end."""
    recorder = Recorder()

    def late_wait(x):
        y = x.clone()
        work = dist.all_reduce(y, async_op=True)
        recorder.spin("backward")(x)
        work.wait()
        return y

    pair = pair_of(chunk(Cross(recorder.spin("forward")), Cross(_all_reduce)), chunk(Cross(late_wait)))
    for step in range(3):
        made = pair(step)
        recorder.times.clear()
        tw.weave(made.forward, made.backward, strategy=strategy)
    return recorder.times


def test_a_turn_is_taken_at_the_wait_and_not_at_the_start(pool):
    """Catches a turn at an asynchronous launch, where the caller may hold a mutex (DDP's reducer does)."""
    for times in pool.run(run_asynchronous, "turns"):
        assert times["backward computes"][0][1] <= times["forward computes"][0][0], times
