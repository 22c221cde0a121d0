"""IDEA: a mixture-of-experts language model with expert parallelism that knows nothing of overlap.

It is plain PyTorch: `dist.all_to_all_single` inside `torch.autograd.Function`, nothing asynchronous, and nothing of
the engine. Every kernel it needs has a deterministic implementation: rows are moved by gathers alone, and the embedding
is a product with one-hot rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torchweave.measure.language import LanguageModel, attend, random_weight
from torchweave.measure.routing import all_to_all, combine, dispatch, places


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model.

    Args:
        layers: How many layers, each attention and a mixture of experts.
        hidden: Width of a token, a multiple of 64.
        ffn: Width inside an expert.
        experts_per_rank: How many experts each rank holds.
        top_k: To how many experts a token goes.
        sequence: Tokens in a sequence.
        capacity_factor: Room of an expert over a perfectly even share; tokens beyond it are dropped.
    """

    layers: int
    hidden: int
    ffn: int
    experts_per_rank: int
    top_k: int
    sequence: int
    capacity_factor: float = 1.0


# (sizes, group, what shared weights are drawn from, what the rank's own are drawn from)
Mixture: TypeAlias = Callable[["ModelSizes", dist.ProcessGroup, torch.Generator, torch.Generator], nn.Module]


class MoeLanguageModel(LanguageModel):
    """Predicts the next byte, with a mixture of experts in every layer.

    Args:
        sizes: The model's sizes.
        group: The ranks that share the experts.
        dtype: Of weights and activations.
        device: Where the weights live.
        seed: Every rank makes the same shared weights from it, and its own experts.
        mixture: Makes the mixture of a layer; None takes one with a fixed capacity.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        mixture: Mixture | None = None,
    ) -> None:
        shared = torch.Generator(device).manual_seed(seed)
        own = torch.Generator(device).manual_seed(seed + 1 + dist.get_rank(group))
        make = mixture or CapacityMixture
        layers = (_Layer(sizes.hidden, make(sizes, group, shared, own), shared) for _ in range(sizes.layers))
        super().__init__(sizes.hidden, sizes.sequence, layers, shared)
        self.sizes = sizes
        self.to(device=device, dtype=dtype)

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the weights that every rank has a copy of; the others are the rank's own experts."""
        return [parameter for name, parameter in self.named_parameters() if ".experts." not in name]


class _Layer(nn.Module):
    def __init__(self, hidden: int, mixture: nn.Module, shared: torch.Generator) -> None:
        super().__init__()
        self.norm_attention, self.norm_experts = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = random_weight(shared, hidden, 3 * hidden)
        self.out = random_weight(shared, hidden, hidden)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        x = x + attend(self.norm_attention(x) @ self.qkv) @ self.out
        mixed: Tensor = self.mixture(self.norm_experts(x).flatten(0, 1))
        return x + mixed.view_as(x)


class CapacityMixture(nn.Module):
    """Top-k routing into slots of a fixed number, dispatch to the experts' ranks, experts, and combine."""

    def __init__(
        self, sizes: ModelSizes, group: dist.ProcessGroup, shared: torch.Generator, own: torch.Generator
    ) -> None:
        super().__init__()
        self.sizes, self.group, self.ranks = sizes, group, dist.get_world_size(group)
        self.num_experts = self.ranks * sizes.experts_per_rank
        self.router = random_weight(shared, sizes.hidden, self.num_experts)
        self.experts = Experts(sizes, own)

    def forward(self, x: Tensor) -> Tensor:
        """Return each token's mixture, shape (tokens, hidden)."""
        tokens, hidden = x.shape
        top_k, local = min(self.sizes.top_k, self.num_experts), self.sizes.experts_per_rank
        capacity = math.ceil(tokens * top_k / self.num_experts * self.sizes.capacity_factor)
        weight, expert = torch.topk((x @ self.router).float().softmax(-1), top_k)
        slot_of, kept, choice_of = places(expert, self.num_experts, capacity)
        weight = (weight * kept).to(x.dtype)

        sent = dispatch(x, slot_of, kept, choice_of)
        received = all_to_all(sent, self.group)
        by_expert = received.view(self.ranks, local, capacity, hidden).transpose(0, 1).reshape(local, -1, hidden)
        made = self.experts(by_expert).view(local, self.ranks, capacity, hidden).transpose(0, 1)
        returned = all_to_all(made.reshape(-1, hidden), self.group)
        return combine(returned, weight, slot_of, choice_of)


class Experts(nn.Module):
    """The rank's own experts, as batched products: two inner projections, gated, and one outer."""

    def __init__(self, sizes: ModelSizes, own: torch.Generator) -> None:
        super().__init__()
        self.inner = random_weight(own, sizes.experts_per_rank, sizes.hidden, 2 * sizes.ffn)
        self.outer = random_weight(own, sizes.experts_per_rank, sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for rows sorted by expert, shape (experts, rows, hidden)."""
        gate, value = torch.bmm(x, self.inner).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * value, self.outer)
