"""IDEA: a byte-level mixture-of-experts language model with expert parallelism that knows nothing of overlap.

It is plain PyTorch: `dist.all_to_all_single` inside `torch.autograd.Function`, nothing asynchronous, and no import of
this library. Every kernel it needs has a deterministic implementation: rows are moved by gathers alone, in both
directions, and the embedding is a product with one-hot rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256


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


class MoeLanguageModel(nn.Module):
    """Predicts the next byte.

    Args:
        sizes: The model's sizes.
        group: The ranks that share the experts.
        dtype: Of weights and activations.
        device: Where the weights live.
        seed: Every rank makes the same shared weights from it, and its own experts.
    """

    def __init__(
        self, sizes: ModelSizes, group: dist.ProcessGroup, *, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        super().__init__()
        self.sizes = sizes
        shared = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(seed + 1 + dist.get_rank(group))
        self.embedding = _weight(shared, VOCABULARY, sizes.hidden, scale=1.0)
        self.position = _weight(shared, sizes.sequence, sizes.hidden, scale=0.1)
        self.layers = nn.ModuleList(_Layer(sizes, group, shared, own) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = _weight(shared, sizes.hidden, VOCABULARY)
        self.to(device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte.

        Args:
            tokens: Bytes, shape (batch, sequence), int64.

        Returns:
            Shape (batch, sequence, 256).
        """
        x = F.one_hot(tokens, VOCABULARY).to(self.embedding.dtype) @ self.embedding
        x = x + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.norm(x) @ self.head
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch's next bytes.

        Args:
            text: Bytes, shape (batch, sequence + 1), int64.

        Returns:
            A scalar, float32, nats a byte.
        """
        return next_byte_loss(self(text[:, :-1]), text[:, 1:])

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the weights that every rank has a copy of; the others are the rank's own experts."""
        return [parameter for name, parameter in self.named_parameters() if ".experts." not in name]


class ModelPart(nn.Module):
    """Consecutive layers of a model, as one stage of a pipeline; its weights have the model's names for them.

    Args:
        model: The whole model, whose weights it takes over.
        layers: Which of its layers.
    """

    def __init__(self, model: MoeLanguageModel, layers: range) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(model.layers)
        if self.is_first:
            self.embedding, self.position = model.embedding, model.position
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in layers})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next part takes, or the logits.

        Args:
            x: Bytes, shape (batch, sequence), int64, for the first part; else shape (batch, sequence, hidden).
        """
        if self.is_first:
            x = F.one_hot(x, VOCABULARY).to(self.embedding.dtype) @ self.embedding + self.position[: x.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        return self.norm(x) @ self.head if self.is_last else x


def parts_of(model: MoeLanguageModel, num_parts: int) -> list[ModelPart]:
    """Cut a model into parts with as many layers each, or one more, the first ones first.

    Args:
        model: The whole model; each weight belongs to one part.
        num_parts: At most as many as it has layers.
    """
    few, more = divmod(len(model.layers), num_parts)
    begins = [index * few + min(index, more) for index in range(num_parts + 1)]
    return [ModelPart(model, range(begin, end)) for begin, end in itertools.pairwise(begins)]


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next bytes, a scalar, float32, nats a byte.

    Args:
        logits: Shape (batch, sequence, 256).
        targets: Bytes, shape (batch, sequence), int64.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class _Layer(nn.Module):
    def __init__(
        self, sizes: ModelSizes, group: dist.ProcessGroup, shared: torch.Generator, own: torch.Generator
    ) -> None:
        super().__init__()
        self.heads = sizes.hidden // 64
        self.norm_attention, self.norm_experts = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.qkv = _weight(shared, sizes.hidden, 3 * sizes.hidden)
        self.out = _weight(shared, sizes.hidden, sizes.hidden)
        self.mixture = _Mixture(sizes, group, shared, own)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_attention(x))
        mixed: Tensor = self.mixture(self.norm_experts(x).flatten(0, 1))
        return x + mixed.view_as(x)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = (x @ self.qkv).view(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, hidden) @ self.out


class _Mixture(nn.Module):
    """Top-k routing, dispatch to the experts' ranks, experts, and combine."""

    def __init__(
        self, sizes: ModelSizes, group: dist.ProcessGroup, shared: torch.Generator, own: torch.Generator
    ) -> None:
        super().__init__()
        self.sizes, self.group, self.ranks = sizes, group, dist.get_world_size(group)
        self.num_experts = self.ranks * sizes.experts_per_rank
        self.router = _weight(shared, sizes.hidden, self.num_experts)
        self.experts = _Experts(sizes, own)

    def forward(self, x: Tensor) -> Tensor:
        """Return each token's mixture, shape (tokens, hidden)."""
        tokens, hidden = x.shape
        top_k, local = min(self.sizes.top_k, self.num_experts), self.sizes.experts_per_rank
        capacity = math.ceil(tokens * top_k / self.num_experts * self.sizes.capacity_factor)
        weight, expert = torch.topk((x @ self.router).float().softmax(-1), top_k)
        slot_of, kept, choice_of = _places(expert, self.num_experts, capacity)
        weight = (weight * kept).to(x.dtype)

        sent = _dispatch(x, slot_of, kept, choice_of)
        received = _all_to_all(sent, self.group)
        by_expert = received.view(self.ranks, local, capacity, hidden).transpose(0, 1).reshape(local, -1, hidden)
        made = self.experts(by_expert).view(local, self.ranks, capacity, hidden).transpose(0, 1)
        returned = _all_to_all(made.reshape(-1, hidden), self.group)
        return _combine(returned, weight, slot_of, choice_of)


class _Experts(nn.Module):
    """The rank's own experts, as batched products: two inner projections, gated, and one outer."""

    def __init__(self, sizes: ModelSizes, own: torch.Generator) -> None:
        super().__init__()
        self.inner = _weight(own, sizes.experts_per_rank, sizes.hidden, 2 * sizes.ffn)
        self.outer = _weight(own, sizes.experts_per_rank, sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for rows sorted by expert, shape (experts, rows, hidden)."""
        gate, value = torch.bmm(x, self.inner).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * value, self.outer)


def _places(expert: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give every choice of a token a slot at its expert, first come first served.

    Args:
        expert: The chosen experts, shape (tokens, top_k).
        num_experts: Over all ranks.
        capacity: Slots of an expert.

    Returns:
        The slot of each choice, shape (tokens, top_k); whether it got one; and the choice in each slot, shape
        (num_experts * capacity), -1 where the slot is empty.
    """
    flat = expert.flatten()
    place = F.one_hot(flat, num_experts).cumsum(0).gather(1, flat[:, None]).squeeze(1) - 1
    kept = place < capacity
    num_slots = num_experts * capacity
    slot = torch.where(kept, flat * capacity + place, num_slots)  # what is dropped shares one place beyond the end
    choice_of = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=expert.device)
    choice_of[slot] = torch.arange(len(flat), device=expert.device)
    return torch.where(kept, slot, 0).view_as(expert), kept.view_as(expert), choice_of[:-1]


class _Dispatch(torch.autograd.Function):
    """Copies tokens into their slots. An empty slot holds some token that nobody reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_of: Tensor, kept: Tensor, choice_of: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of, kept)
        return x[choice_of.clamp_min(0) // slot_of.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        slot_of, kept = ctx.saved_tensors
        # one choice after another: no (tokens, top_k, hidden) in memory, and always the same order of additions
        grad = grads[0][slot_of[:, 0]] * kept[:, :1]
        for k in range(1, slot_of.shape[1]):
            grad += grads[0][slot_of[:, k]] * kept[:, k : k + 1]
        return grad, None, None, None


class _Combine(torch.autograd.Function):
    """Adds up each token's rows, weighted; a dropped choice has weight zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, slot_of: Tensor, choice_of: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, slot_of, choice_of)
        out = rows[slot_of[:, 0]] * weight[:, :1]
        for k in range(1, slot_of.shape[1]):
            out += rows[slot_of[:, k]] * weight[:, k : k + 1]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, slot_of, choice_of = ctx.saved_tensors
        (grad,) = grads
        filled = (choice_of >= 0).to(grad.dtype)
        choice = choice_of.clamp_min(0)
        grad_rows = grad[choice // slot_of.shape[1]] * (weight.flatten()[choice] * filled)[:, None]
        parts = [(rows[slot_of[:, k]] * grad).sum(-1) for k in range(slot_of.shape[1])]
        return grad_rows, torch.stack(parts, dim=1), None, None


class _AllToAll(torch.autograd.Function):
    """Exchanges equal shares between the ranks; the backward sends the gradients the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grads[0])
        dist.all_to_all_single(out, grads[0].contiguous(), group=ctx.group)
        return out, None


# not annotated in torch
_dispatch: Callable[..., Tensor] = _Dispatch.apply
_combine: Callable[..., Tensor] = _Combine.apply
_all_to_all: Callable[..., Tensor] = _AllToAll.apply


def _weight(generator: torch.Generator, *shape: int, scale: float | None = None) -> nn.Parameter:
    """Return a random weight whose products keep the size of their inputs."""
    spread = shape[-2] ** -0.5 if scale is None else scale
    return nn.Parameter(torch.randn(shape, generator=generator) * spread)
