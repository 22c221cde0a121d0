"""IDEA: a byte-level language model around any layers: what all the models that are measured share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torchweave.measure.sizes import HEAD

VOCABULARY = 256


class LanguageModel(nn.Module):
    """Predicts the next byte.

    Args:
        hidden: Width of a token, a multiple of 64.
        sequence: Tokens in a sequence.
        layers: From (batch, sequence, hidden) to the same shape, one after the other.
        shared: What the weights are drawn from: the same on every rank.
    """

    def __init__(self, hidden: int, sequence: int, layers: Iterable[nn.Module], shared: torch.Generator) -> None:
        super().__init__()
        self.embedding = random_weight(shared, VOCABULARY, hidden, scale=1.0)
        self.position = random_weight(shared, sequence, hidden, scale=0.1)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(hidden)
        self.head = random_weight(shared, hidden, VOCABULARY)

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
        """Return the weights that every rank has a copy of."""
        return list(self.parameters())


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next bytes, a scalar, float32, nats a byte.

    Args:
        logits: Shape (batch, sequence, 256).
        targets: Bytes, shape (batch, sequence), int64.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def attend(qkv: Tensor) -> Tensor:
    """Return causal self-attention.

    Args:
        qkv: Queries, keys and values, shape (batch, sequence, 3 * width), the width a multiple of 64.

    Returns:
        Shape (batch, sequence, width).
    """
    batch, length, width = qkv.shape
    heads = qkv.view(batch, length, 3, width // 3 // HEAD, HEAD).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
    return attended.transpose(1, 2).reshape(batch, length, width // 3)


def random_weight(generator: torch.Generator, *shape: int, scale: float | None = None) -> nn.Parameter:
    """Return a random weight whose products keep the size of their inputs.

    Args:
        generator: What it is drawn from.
        shape: Its shape, the inputs next to last.
        scale: Standard deviation; None takes that of the inputs' number.
    """
    spread = shape[-2] ** -0.5 if scale is None else scale
    return nn.Parameter(torch.randn(shape, generator=generator, device=generator.device) * spread)
