"""Another order of turns on two ranks: it is searched in measured times, proved on all ranks, and bit-equal."""

from __future__ import annotations

import random

import torch.distributed as dist
from harness import Cross, chain_of, check_pairs, chunk, pair_of

import torchweave as tw
from torchweave.engine import reorder
from torchweave.engine.forecast import alternating, kept_in, segments_of
from torchweave.engine.order import ALTERNATING
from torchweave.engine.pair import engine
from torchweave.engine.trial import MEASURED, READ, REORDERED, ROUNDS, SETTLE
from torchweave.engine.turns import Turns

# the recorded pair, a measured one, three strategies, another order, and until one is chosen
UNTIL_CHOSEN = 1 + 1 + 3 * ROUNDS + ROUNDS + SETTLE + READ + 1


def reduced(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def gathered(x):
    parts = [x.new_empty(x.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return sum(parts)


def with_orders(choose_order, run):
    """Run with a search that takes what `choose_order` says, and return that, and the orders that pairs really had."""
    ran, kept = [], reorder.better_order

    def better_order(backward, forward, times_us):
        strands = segments_of(backward, times_us, "backward"), segments_of(forward, times_us, "forward")
        return kept_in(choose_order(len(strands[0]), len(strands[1])), *strands), "as the test says", ""

    class Watched(Turns):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            ran.append(self._kept)

    import torchweave.engine.pair as pair

    reorder.better_order, pair.Turns = better_order, Watched
    try:
        run()
    finally:
        reorder.better_order, pair.Turns = kept, Turns
    (choice,) = tw.choices()
    return choice, ran


def shuffled(seed):
    def choose_order(num_backward, num_forward):
        letters = list("B" * (num_backward - 1) + "F" * num_forward)
        random.Random(seed).shuffle(letters)
        return "B" + "".join(letters)

    return choose_order


def uneven():
    """A forward that crosses more often than the backward."""
    return pair_of(chunk(*(Cross(gathered) for _ in range(5))), chunk(Cross(reduced), Cross(gathered)))


def chained():
    return chain_of(chunk(Cross(reduced), Cross(gathered), Cross(reduced)))


def run_in_some_order(seed):
    make = uneven if seed % 2 else chained
    choice, ran = with_orders(shuffled(seed), lambda: check_pairs(make, "auto", "woven", UNTIL_CHOSEN))
    return choice.times_ms, sum(any(kept.values()) for kept in ran)


def test_pairs_in_any_order_are_bit_equal(pool):
    """Catches an order that depends on more than the strands' steps, and turns that are kept on one rank alone."""
    for seed in (1, 2):
        for times_ms, num_reordered in pool.run(run_in_some_order, seed):
            assert set(times_ms) == {"turns", "streams", "serial", REORDERED}
            assert num_reordered >= ROUNDS


def an_order_for_each_rank():
    def choose_order(num_backward, num_forward):
        alternate = alternating(num_backward, num_forward)
        return alternate if dist.get_rank() else "B" * num_backward + "F" * num_forward

    choice, ran = with_orders(choose_order, lambda: check_pairs(uneven, "auto", "woven", UNTIL_CHOSEN))
    return choice.times_ms, sum(any(kept.values()) for kept in ran)


def test_ranks_that_find_different_orders_alternate(pool):
    """Catches an order that is taken without a proof: the ranks would exchange wrong data without an error."""
    for times_ms, num_reordered in pool.run(an_order_for_each_rank):
        assert set(times_ms) == {"turns", "streams", "serial"}
        assert num_reordered == 0


def failing_while_measured():
    from harness import PlantedError

    crossing, other = chunk(Cross(reduced), Cross(reduced)), chunk(Cross(reduced), Cross(reduced))
    pair, told = pair_of(crossing, other), []
    for step in range(UNTIL_CHOSEN):
        one = pair(step)

        def forward(one=one, step=step):
            result = one.forward()
            if step == 2:
                raise PlantedError("planted")
            return result

        try:
            tw.weave(forward, one.backward)
        except PlantedError:
            told.append(step)
    (choice,) = tw.choices()
    decision = next(iter(engine()._decisions.values()))
    return told, set(choice.times_ms), decision.reorder.kept == ALTERNATING, decision.reorder.told


def test_a_pair_that_fails_while_it_is_measured_leaves_the_order_as_it_is(pool):
    """Catches a search in the times of half a pair, and ranks that wait for what will never be said."""
    for failed, tried, alternates, why in pool.run(failing_while_measured):
        assert failed == [2]
        assert tried == {"turns", "streams", "serial"}
        assert MEASURED not in tried
        assert alternates
        assert "did not come to its end" in why
