"""IDEA: interleaved 1F1B: several chunks a rank, each a part of the model, make the warm-up as much shorter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchweave.schedule.action import Action, pair


def interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, pairs: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank.

    Microbatches go in rounds: as many as there are ranks (or a few more, evenly, if they do not divide) through one
    chunk, then the same ones through the next chunk.

    Args:
        num_ranks: Ranks.
        num_microbatches: A multiple of the number of rounds, max(1, num_microbatches // num_ranks).
        num_chunks: Stages on each rank: rank r has r, r + num_ranks, r + 2 * num_ranks, and so on.
        pairs: Whether a forward and the backward after it are a pair. Each rank then runs one more forward ahead,
            without which the two would wait for each other's rank in turn.

    Source: Megatron-LM, https://arxiv.org/abs/2104.04473, section 2.2, and for pairs its combined 1F1B; uneven rounds
        as in torch.distributed.pipelining.
    """
    in_round = num_microbatches // max(1, num_microbatches // num_ranks)
    ahead = [(num_chunks - 1) * in_round + 2 * (num_ranks - 1 - rank) + pairs for rank in range(num_ranks)]
    orders = [_Order(rank, num_ranks, num_chunks, in_round) for rank in range(num_ranks)]
    return tuple(
        tuple(_rank(order, min(first, total := num_microbatches * num_chunks), total, pairs))
        for order, first in zip(orders, ahead, strict=True)
    )


class _Order(NamedTuple):
    """In which order the forwards, and the backwards, of a rank come."""

    rank: int
    num_ranks: int
    num_chunks: int
    in_round: int

    def forward(self, number: int) -> Action:
        chunk, microbatch = self._place(number)
        return Action(chunk * self.num_ranks + self.rank, "F", microbatch)

    def backward(self, number: int) -> Action:
        chunk, microbatch = self._place(number)
        return Action((self.num_chunks - 1 - chunk) * self.num_ranks + self.rank, "B", microbatch)

    def _place(self, number: int) -> tuple[int, int]:
        turn, within = divmod(number, self.in_round)
        return turn % self.num_chunks, turn // self.num_chunks * self.in_round + within


def _rank(order: _Order, ahead: int, total: int, pairs: bool) -> Iterator[Action]:
    for number in range(ahead):
        yield order.forward(number)
    for number in range(total):
        if number + ahead >= total:
            yield order.backward(number)
        elif pairs:
            yield pair(order.forward(number + ahead), order.backward(number))
        else:
            yield order.forward(number + ahead)
            yield order.backward(number)
