"""IDEA: a language model cut into consecutive parts, the stages of a pipeline; weights keep the whole model's names."""

from __future__ import annotations

import itertools

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torchweave.measure.language import VOCABULARY, LanguageModel


class ModelPart(nn.Module):
    """Consecutive layers of a model, with its embedding before the first and its head after the last.

    Args:
        model: The whole model, whose weights it takes over.
        layers: Which of its layers.
    """

    def __init__(self, model: LanguageModel, layers: range) -> None:
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


def parts_of(model: LanguageModel, num_parts: int) -> list[ModelPart]:
    """Cut a model into parts with as many layers each, or one more, the first ones first.

    Args:
        model: The whole model; each weight belongs to one part.
        num_parts: At most as many as it has layers.
    """
    few, more = divmod(len(model.layers), num_parts)
    begins = [index * few + min(index, more) for index in range(num_parts + 1)]
    return [ModelPart(model, range(begin, end)) for begin, end in itertools.pairwise(begins)]
