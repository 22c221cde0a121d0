"""The model of the examples: a chunk of mixture-of-experts layers in plain PyTorch, ignorant of torchweave."""

import torch
import torch.distributed as dist
from torch import nn


class Exchange(torch.autograd.Function):
    """An all-to-all, whose gradient is the same all-to-all back. Without other ranks it exchanges nothing."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        if not dist.is_initialized():
            return x.clone()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group), None


class MoELayer(nn.Module):
    """Every expert picks the tokens that it scores highest, gets them from all ranks, and sends its results back."""

    def __init__(self, hidden: int, experts_per_rank: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group, self.ranks = group, dist.get_world_size(group) if dist.is_initialized() else 1
        self.gate = nn.Linear(hidden, experts_per_rank * self.ranks, bias=False)
        self.up = nn.Parameter(torch.randn(experts_per_rank, hidden, 2 * hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts_per_rank, 2 * hidden, hidden) / (2 * hidden) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, hidden = x.shape
        local = self.up.shape[0]
        scores = self.gate(x).softmax(-1)
        weight, picked = scores.T.topk(2 * tokens // (local * self.ranks), dim=1)  # each token twice, on average
        sent = x[picked]  # (experts of all ranks, tokens each, hidden)
        got = Exchange.apply(sent, self.group).view(self.ranks, local, -1, hidden).transpose(0, 1).flatten(1, 2)
        done = torch.bmm(torch.bmm(got, self.up).relu(), self.down)
        back = Exchange.apply(done.view(local, self.ranks, -1, hidden).transpose(0, 1).reshape(sent.shape), self.group)
        combined = (back * weight.unsqueeze(-1)).flatten(0, 1)
        return x + torch.zeros_like(x).index_add(0, picked.flatten(), combined)


def make_chunk(
    layers: int, hidden: int, experts_per_rank: int = 2, group: dist.ProcessGroup | None = None
) -> nn.Module:
    return nn.Sequential(*[MoELayer(hidden, experts_per_rank, group) for _ in range(layers)])
