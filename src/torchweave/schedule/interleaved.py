"""IDEA: interleaved 1F1B: several chunks a rank, each a part of the model, make the warm-up as much shorter."""

from __future__ import annotations

from torchweave.schedule.action import Action


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank.

    Microbatches go in rounds: as many as there are ranks (or a few more, evenly, if they do not divide) through one
    chunk, then the same ones through the next chunk.

    Args:
        num_ranks: Ranks.
        num_microbatches: A multiple of the number of rounds, max(1, num_microbatches // num_ranks).
        num_chunks: Stages on each rank: rank r has r, r + num_ranks, r + 2 * num_ranks, and so on.

    Source: Megatron-LM, https://arxiv.org/abs/2104.04473, section 2.2; uneven rounds as in
        torch.distributed.pipelining.
    """
    in_round = num_microbatches // max(1, num_microbatches // num_ranks)
    return tuple(_rank(rank, num_ranks, num_microbatches, num_chunks, in_round) for rank in range(num_ranks))


def _rank(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, in_round: int) -> tuple[Action, ...]:
    total = num_microbatches * num_chunks

    def place(number: int) -> tuple[int, int]:
        """Return chunk and microbatch of the forward that comes as number so-and-so."""
        turn, within = divmod(number, in_round)
        return turn % num_chunks, turn // num_chunks * in_round + within

    def forward(number: int) -> Action:
        chunk, microbatch = place(number)
        return Action(chunk * num_ranks + rank, "F", microbatch)

    def backward(number: int) -> Action:
        chunk, microbatch = place(number)
        return Action((num_chunks - 1 - chunk) * num_ranks + rank, "B", microbatch)

    ahead = min((num_chunks - 1) * in_round + 2 * (num_ranks - 1 - rank), total)
    actions = [forward(number) for number in range(ahead)]
    for number in range(total):
        if number + ahead < total:
            actions.append(forward(number + ahead))
        actions.append(backward(number))
    return tuple(actions)
