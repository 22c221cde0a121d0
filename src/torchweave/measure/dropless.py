"""IDEA: a mixture of experts that drops no token: the device computes how many rows go where, and the host reads it.

So do real models: without these numbers the host can neither allocate what it receives nor call the all-to-all. It
waits for the device in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torchweave.measure.language import random_weight
from torchweave.measure.moe import ModelSizes
from torchweave.measure.routing import all_to_all, combine, dispatch


class DroplessMixture(nn.Module):
    """Top-k routing, as many rows to each expert as chose it, experts, and combine.

    Args:
        sizes: The model's sizes.
        group: The ranks that share the experts.
        shared: What the router's weights are drawn from: the same on every rank.
        own: What this rank's experts are drawn from.
    """

    def __init__(
        self, sizes: ModelSizes, group: dist.ProcessGroup, shared: torch.Generator, own: torch.Generator
    ) -> None:
        super().__init__()
        self.sizes, self.group, self.ranks = sizes, group, dist.get_world_size(group)
        self.num_experts = self.ranks * sizes.experts_per_rank
        self.router = random_weight(shared, sizes.hidden, self.num_experts)
        self.experts = nn.ModuleList(_Expert(sizes, own) for _ in range(sizes.experts_per_rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return each token's mixture, shape (tokens, hidden)."""
        top_k, local = min(self.sizes.top_k, self.num_experts), self.sizes.experts_per_rank
        weight, expert = torch.topk((x @ self.router).float().softmax(-1), top_k)
        choice_of, row_of = _sorted_by(expert.flatten())
        row_of = row_of.view_as(expert)

        counts = F.one_hot(expert.flatten(), self.num_experts).sum(0)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        counts, theirs = counts.view(self.ranks, local), theirs.view(self.ranks, local)
        numbers = torch.cat([counts.sum(1), theirs.sum(1), theirs.sum(0)]).tolist()
        sent, received, by_expert = numbers[: self.ranks], numbers[self.ranks : -local], numbers[-local:]

        rows = dispatch(x, row_of, torch.ones_like(row_of, dtype=torch.bool), choice_of)
        rows = all_to_all(rows, self.group, sent, received)
        # they came by rank, and within a rank by expert
        expert_of = torch.arange(local, device=x.device).repeat(self.ranks)
        expert_of = expert_of.repeat_interleave(theirs.flatten(), output_size=sum(received))
        order, back = _sorted_by(expert_of)
        made = [make(part) for make, part in zip(self.experts, _move(rows, order, back).split(by_expert), strict=True)]
        returned = all_to_all(_move(torch.cat(made), back, order), self.group, received, sent)
        return combine(returned, weight.to(x.dtype), row_of, choice_of)


class _Expert(nn.Module):
    def __init__(self, sizes: ModelSizes, own: torch.Generator) -> None:
        super().__init__()
        self.inner = random_weight(own, sizes.hidden, 2 * sizes.ffn)
        self.outer = random_weight(own, sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = (x @ self.inner).chunk(2, dim=-1)
        return (F.silu(gate) * value) @ self.outer


def _sorted_by(key: Tensor) -> tuple[Tensor, Tensor]:
    """Return which element stands at each place once sorted, and at which place each element stands."""
    order = torch.argsort(key, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=key.device)
    return order, place


class _Move(torch.autograd.Function):
    """Reorders rows; the backward reorders them back, by a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0][back], None, None


_move: Callable[..., Tensor] = _Move.apply  # not annotated in torch
