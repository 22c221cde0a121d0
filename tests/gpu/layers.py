"""Layers that communicate, and the pairs of a model of them: what tests on one GPU and on several share."""

import torch
import torch.distributed as dist
from harness import device
from torch.utils.checkpoint import checkpoint

import torchweave as tw

HIDDEN, TOKENS = 512, 256


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


class Chunk(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.layer = layer

    def forward(self, x):
        for linear in self.linears:
            x = self.layer(linear, x)
        return x


def plain(linear, x):
    return Exchange.apply(torch.tanh(linear(x)))


def with_dropout(linear, x):
    return Exchange.apply(torch.nn.functional.dropout(linear(x), 0.1))


def reduced(linear, x):
    y = linear(x)
    total = y.detach().sum(0)
    work = dist.all_reduce(total, async_op=True)
    z = torch.tanh(y)
    work.wait()
    return Exchange.apply(z) + total


def checkpointed(linear, x):
    return checkpoint(with_dropout, linear, x, use_reentrant=False)


def checkpointed_reentrant(linear, x):
    return checkpoint(with_dropout, linear, x, use_reentrant=True)


def region(linear, x):
    y = linear(x)
    with tw.communication():
        y = y * 2 + 1
    return Exchange.apply(y)


def functional(linear, x):
    from torch.distributed import _functional_collectives as collectives

    y = torch.tanh(linear(x))
    moved = collectives.all_to_all_single_autograd(y, None, None, dist.group.WORLD)
    return moved * 1.0


def run(layer, strategy, rounds=3):
    """Return everything that a few pairs leave behind."""
    torch.manual_seed(1 + dist.get_rank())
    chunks = [Chunk(layer).to(device()) for _ in range(2)]
    left = []
    loss = chunks[0](torch.randn(TOKENS, HIDDEN, device=device(), requires_grad=True)).square().mean()
    for index in range(rounds):
        chunk, x = chunks[(index + 1) % 2], torch.randn(TOKENS, HIDDEN, device=device(), requires_grad=True)
        loss = tw.weave(
            lambda: chunk(x).square().mean(), lambda: loss.backward(), strategy=strategy, kind=layer.__name__
        )
        left.append(loss.detach())
    loss.backward()
    left.extend(parameter.grad for chunk in chunks for parameter in chunk.parameters())
    left.extend([torch.rand(3, device=device()), torch.rand(3)])
    return [tensor.cpu() for tensor in left]


LAYERS = (plain, with_dropout, reduced, checkpointed, checkpointed_reentrant, region, functional)


def is_refused(layer, strategy):
    """Whether free strands refuse a layer: its backward sets the random state."""
    return strategy == "streams" and layer in (checkpointed, checkpointed_reentrant)
