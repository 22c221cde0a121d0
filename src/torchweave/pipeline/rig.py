"""IDEA: what a pipeline has on a rank, from step to step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from torchweave.pipeline.book import Book
from torchweave.pipeline.faults import Guard
from torchweave.pipeline.p2p import Wire
from torchweave.pipeline.stage import Stage
from torchweave.pipeline.sums import Sums


@dataclass(frozen=True)
class Rig:
    """What a pipeline has on this rank, from step to step.

    Attributes:
        rank: This rank, within the pipeline.
        ranks: The global rank of each rank of the pipeline.
        stages: The stages that this rank has, by their numbers.
        strategy: By which strategy pairs are woven.
        name: What the kinds of this pipeline's pairs are called.
        stops_at_nan: Whether a loss that is not finite is a failure.
    """

    rank: int
    ranks: tuple[int, ...]
    stages: dict[int, Stage]
    wire: Wire
    book: Book
    guard: Guard
    sums: Sums
    device: torch.device
    strategy: str
    name: Hashable
    stops_at_nan: bool
