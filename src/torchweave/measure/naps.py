"""IDEA: computation whose length is known and which takes no processor: it sleeps, twice as long backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0].clone(), None


_apply: Callable[..., Tensor] = _Nap.apply


def nap(x: Tensor, seconds: float) -> Tensor:
    """Sleep, and return a copy of a tensor; its backward sleeps twice as long.

    Args:
        x: The tensor.
        seconds: How long the forward sleeps.
    """
    return _apply(x, seconds)


class Sleeper(nn.Module):
    """A stage with a small weight that takes a known time.

    Args:
        seconds: How long its forward sleeps; its backward sleeps twice as long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Run it on rows of 4."""
        return nap(self.linear(x), self.seconds)
