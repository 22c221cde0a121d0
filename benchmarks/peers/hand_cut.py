"""A layer cut by hand into attention, dispatch, experts and combine, and a pair in the order that Megatron uses:

    combine(B) attn(F) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(F) attn(B) attn(W) combine(F)

Exchanges are started as soon as their input is there and waited for as late as they can be; input and weight gradients
are apart. It costs a user the 150 lines below for this one model, and again for every other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.autograd.graph import get_gradient_edge

from torchweave.measure.language import VOCABULARY, attend
from torchweave.measure.routing import combine, dispatch, places
from torchweave.pipeline.backward import input_backward

LINES = 150


@dataclass
class Segment:
    """A part of the graph: where it begins, and where it ends."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    later: list = field(default_factory=list)

    def back(self, grads):
        """Compute the inputs' gradients; the weights' wait for `weights`."""
        pairs = [
            (get_gradient_edge(out), grad) for out, grad in zip(self.outputs, grads, strict=True) if grad is not None
        ]
        found, part = input_backward([edge for edge, _ in pairs], [grad for _, grad in pairs], self.inputs)
        self.later.append(part)
        return found

    def weights(self):
        self.later.pop().run()


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


class Exchange:
    """An all-to-all under way."""

    def __init__(self, x, group):
        self.sent = x.detach().contiguous()
        self.received = torch.empty_like(self.sent)
        self.work = dist.all_to_all_single(self.received, self.sent, group=group, async_op=True)

    def wait(self):
        self.work.wait()
        return self.received


class Forward:
    """The forward of one microbatch, layer by layer."""

    def __init__(self, model, text):
        self.model, self.text = model, text
        self.before: list[Segment] = []
        self.experts: list[Segment] = []
        self.loss = None

    def attn(self, index):
        """Finish the layer before, and go on to what the experts are sent."""
        if index == 0:
            self.x = F.one_hot(self.text[:, :-1], VOCABULARY).to(self.model.embedding.dtype) @ self.model.embedding
            self.x = self.x + self.model.position[: self.text.shape[1] - 1]
            inputs = []
        else:
            inputs = self._combined()
        layer = self.model.layers[index]
        x = self.x
        h = x + attend(layer.norm_attention(x) @ layer.qkv) @ layer.out
        flat, mixture = layer.norm_experts(h).flatten(0, 1), layer.mixture
        sizes = mixture.sizes
        top_k = min(sizes.top_k, mixture.num_experts)
        capacity = math.ceil(len(flat) * top_k / mixture.num_experts * sizes.capacity_factor)
        weight, expert = torch.topk((flat @ mixture.router).float().softmax(-1), top_k)
        slot_of, kept, choice_of = places(expert, mixture.num_experts, capacity)
        weight = (weight * kept).to(x.dtype)
        sent = dispatch(flat, slot_of, kept, choice_of)
        self.before.append(Segment(inputs, [sent, h, weight]))
        self.routing, self.capacity = (slot_of, choice_of), capacity
        return sent

    def mlp(self, index, received):
        mixture = self.model.layers[index].mixture
        (rows,) = leaves(received)
        local, hidden = mixture.sizes.experts_per_rank, rows.shape[-1]
        by_expert = rows.view(mixture.ranks, local, self.capacity, hidden).transpose(0, 1).reshape(local, -1, hidden)
        made = mixture.experts(by_expert).view(local, mixture.ranks, self.capacity, hidden).transpose(0, 1)
        made = made.reshape(-1, hidden)
        self.experts.append(Segment([rows], [made]))
        return made

    def take(self, returned):
        self.returned = returned

    def _combined(self):
        _, h, weight = self.before[-1].outputs
        inputs = leaves(self.returned, h, weight)
        self.x = inputs[1] + combine(inputs[0], inputs[2], *self.routing).view_as(h)
        return inputs

    def end(self):
        inputs = self._combined()
        logits = self.model.norm(self.x) @ self.model.head
        self.loss = F.cross_entropy(logits.float().flatten(0, 1), self.text[:, 1:].flatten())
        self.before.append(Segment(inputs, [self.loss]))
        return self.loss


class HandCut:
    """Pairs of one model whose layers are cut by hand.

    Args:
        subject: The model, its group, and its text.
    """

    def __init__(self, subject) -> None:
        self.subject, self.model, self.group = subject, subject.model, subject.group
        self.num_layers = len(self.model.layers)

    def make_pair(self):
        self.model.zero_grad(set_to_none=True)
        first, second = self.subject.batches.next(), self.subject.batches.next()
        return self.new(second), self.ran(first)

    def new(self, text):
        return Forward(self.model, text)

    def ran(self, text):
        """Return a forward that has run, cut as a pair cuts it."""
        whole = Forward(self.model, text)
        for index in range(self.num_layers):
            received = Exchange(whole.attn(index), self.group).wait()
            whole.take(Exchange(whole.mlp(index, received), self.group).wait())
        whole.end()
        return whole

    def run(self, *, forward, backward):
        f, b, last = forward, backward, self.num_layers - 1
        grads = b.before[-1].back([None if b.loss is None else torch.ones_like(b.loss)])
        b.before[-1].weights()
        for index in range(self.num_layers):
            back = last - index
            combining_back = Exchange(grads[0], self.group)
            dispatching = Exchange(f.attn(index), self.group)
            (grad_rows,) = b.experts[back].back([combining_back.wait()])
            dispatching_back = Exchange(grad_rows, self.group)
            b.experts[back].weights()
            combining = Exchange(f.mlp(index, dispatching.wait()), self.group)
            grads = b.before[back].back([dispatching_back.wait(), grads[1], grads[2]])
            b.before[back].weights()
            f.take(combining.wait())
        return f.end()

    def is_bit_equal(self, deterministic) -> bool:
        """Return whether loss and gradients of a pair are those of backward, then forward."""
        first, second = self.subject.batches.next(), self.subject.batches.next()
        found = []
        with deterministic:
            for cut in (False, True):
                self.model.zero_grad(set_to_none=True)
                if cut:
                    loss = self.run(forward=self.new(second), backward=self.ran(first))
                else:
                    self.model.loss(first).backward()
                    loss = self.model.loss(second)
                found.append([loss.detach(), *(parameter.grad for parameter in self.model.parameters())])
        return all(torch.equal(one, other) for one, other in zip(*found, strict=True))
