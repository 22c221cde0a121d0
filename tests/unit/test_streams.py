"""Free strands issue in one fixed order, and nobody waits for a strand that does not come."""

from __future__ import annotations

import random
import threading

import pytest

from torchweave.engine.lanes import Lanes
from torchweave.engine.play import Strands
from torchweave.engine.streams import Streams
from torchweave.errors import WaitLimitError

LIMIT_S = 20


def strands_of(order):
    return Strands(Streams(0, (), None, order, Lanes()))


def in_threads(*calls):
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a strand waits for ever"


@pytest.mark.parametrize("seed", range(4))
def test_operations_are_issued_in_the_one_order(seed):
    """Catches a strand that overtakes the other, and one that misses that its turn has come."""
    shuffled = random.Random(seed)
    order = [shuffled.choice(("backward", "forward")) for _ in range(3000)]
    strands, issued = strands_of(order), []

    def run(strand):
        busy = random.Random(f"{seed} {strand.name}")
        for _ in range(order.count(strand.name)):
            strand.conduct.before_issue(strand)
            issued.append(strand.name)
            strand.conduct.after_issue(strand)
            for _ in range(busy.choice((0, 0, 0, 10, 300))):
                pass
        strand.conduct.end(strand)

    in_threads(lambda: run(strands.backward), lambda: run(strands.forward))
    assert issued == order


@pytest.mark.parametrize("stop", ["ends", "fails"])
def test_a_strand_goes_on_where_the_other_stops(stop):
    """Catches a strand that waits its whole limit for one that has ended or failed."""
    strands, went_on = strands_of(["backward", "forward"]), threading.Event()
    conduct = strands.conduct

    def forward():
        conduct.before_issue(strands.forward)
        went_on.set()

    def backward():
        while "forward" not in conduct._waiting:
            pass
        if stop == "fails":
            strands.backward.error = ValueError("planted")
            conduct.fail(strands.backward, strands.backward.error)
        conduct.end(strands.backward)

    in_threads(forward, backward)
    assert went_on.is_set()


def test_a_strand_that_waits_too_long_says_for_what():
    """Catches a wait without an end."""
    strands = strands_of(["backward", "forward"])
    strands.conduct._patience_s = 0.01
    with pytest.raises(WaitLimitError, match="operation 0 of the backward strand"):
        strands.conduct.before_issue(strands.forward)
