"""What tests of pipelines share: which rank does what, a stage that exchanges tokens, and a measure of overlap."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import Cross
from torch import nn

from torchweave.intervals import intersection, length, union

DIM = 6


class Grid:
    """This rank's place: ranks of one pipeline lie apart, those that exchange tokens lie together.

    Args:
        pp: Ranks of a pipeline.
    """

    def __init__(self, pp):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.pp, self.ep = pp, world // pp
        self.pp_rank, self.ep_rank = rank // self.ep, rank % self.ep
        # every rank makes all groups, in one order
        rows = [dist.new_group(list(range(i * self.ep, (i + 1) * self.ep))) for i in range(pp)]
        columns = [dist.new_group(list(range(i, world, self.ep))) for i in range(self.ep)]
        self.ep_group, self.pp_group = rows[self.pp_rank], columns[self.ep_rank]

    def exchange(self, x):
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=self.ep_group)
        return received


class Block(nn.Module):
    """A stage: one or two outputs; the second, of another dtype and without a gradient, is passed on."""

    def __init__(self, exchange, num_outputs=1, dropout=0.0):
        super().__init__()
        layers = []
        for _ in range(2):
            layers += [nn.Linear(DIM, DIM), nn.Dropout(dropout), nn.Tanh(), Cross(exchange)]
        self.layers, self.num_outputs = nn.Sequential(*layers, nn.Linear(DIM, DIM)), num_outputs

    def forward(self, x, mask=None, *, bias=None):
        x = self.layers(x)
        if bias is not None:
            x = x + bias
        return x if self.num_outputs == 1 else (x, mask.clone())


def overlapped_ns(spans):
    """Return how long one strand computed while the other one was away at a crossing, ns."""
    times = {
        (name, away): union([span[2:] for span in spans if span[0] == name and (span[1] != "compute") == away])
        for name in ("forward", "backward")
        for away in (True, False)
    }
    return sum(
        length(intersection(times[name, True], times[other, False]))
        for name, other in (("forward", "backward"), ("backward", "forward"))
    )
