"""IDEA: a dense language model with tensor parallelism: two all-reduces a layer in each direction, or none at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torchweave.errors import UsageError
from torchweave.measure.language import LanguageModel, attend, random_weight
from torchweave.measure.sizes import HEAD


@dataclass(frozen=True, slots=True)
class DenseSizes:
    """The sizes of a model.

    Args:
        layers: How many layers, each attention and a gated perceptron.
        hidden: Width of a token, a multiple of 64 times the ranks.
        ffn: Width inside the perceptron over all ranks.
        sequence: Tokens in a sequence.
    """

    layers: int
    hidden: int
    ffn: int
    sequence: int


class DenseLanguageModel(LanguageModel):
    """Predicts the next byte.

    Args:
        sizes: The model's sizes.
        group: The ranks that share each product; None computes alone and communicates nothing.
        dtype: Of weights and activations.
        device: Where the weights live.
        seed: Every rank makes the same shared weights from it, and its own parts.

    Raises:
        UsageError: The heads, or the perceptron's width, cannot be divided among the ranks.
    """

    def __init__(
        self,
        sizes: DenseSizes,
        group: dist.ProcessGroup | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        ranks = 1 if group is None else dist.get_world_size(group)
        if sizes.hidden % (HEAD * ranks) or sizes.ffn % ranks:
            raise UsageError(
                "Tensor parallelism divides attention heads and the perceptron's width among the ranks",
                given=f"hidden {sizes.hidden} ({sizes.hidden // HEAD} heads), ffn {sizes.ffn}, {ranks} ranks",
                remedy=f"take a hidden size that is a multiple of {HEAD * ranks}",
            )
        shared = torch.Generator(device).manual_seed(seed)
        own = torch.Generator(device).manual_seed(seed + 1 + (0 if group is None else dist.get_rank(group)))
        layers = (_Layer(sizes, ranks, group, own) for _ in range(sizes.layers))
        super().__init__(sizes.hidden, sizes.sequence, layers, shared)
        self.to(device=device, dtype=dtype)

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the weights that every rank has a copy of; the products' are divided."""
        parts = (".qkv", ".out", ".inner", ".outer")
        return [parameter for name, parameter in self.named_parameters() if not name.endswith(parts)]


class _Layer(nn.Module):
    def __init__(self, sizes: DenseSizes, ranks: int, group: dist.ProcessGroup | None, own: torch.Generator) -> None:
        super().__init__()
        self.group, width, ffn = group, sizes.hidden // ranks, sizes.ffn // ranks
        self.norm_attention, self.norm_ffn = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.qkv = random_weight(own, sizes.hidden, 3 * width)
        self.out = random_weight(own, width, sizes.hidden)
        self.inner = random_weight(own, sizes.hidden, 2 * ffn)
        self.outer = random_weight(own, ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        attended = attend(self._enter(self.norm_attention(x)) @ self.qkv) @ self.out
        x = x + self._leave(attended)
        gate, value = (self._enter(self.norm_ffn(x)) @ self.inner).chunk(2, dim=-1)
        return x + self._leave((F.silu(gate) * value) @ self.outer)

    def _enter(self, x: Tensor) -> Tensor:
        return x if self.group is None else _enter(x, self.group)

    def _leave(self, x: Tensor) -> Tensor:
        return x if self.group is None else _leave(x, self.group)


class _Enter(torch.autograd.Function):
    """Where a divided product begins: the gradient is the sum of what each rank's part gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    """Where a divided product ends: the result is the sum of all ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# not annotated in torch
_enter: Callable[..., Tensor] = _Enter.apply
_leave: Callable[..., Tensor] = _Leave.apply
