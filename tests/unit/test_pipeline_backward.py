"""Input gradients first and weight gradients later give the bits of one backward, for any graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchweave.pipeline.backward import full_backward, input_backward

DIM = 6


class Product(torch.autograd.Function):
    """A product of the user's own; counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        Product.runs += 1
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class Pool(nn.Module):
    """Weights that the operations of a random graph share."""

    def __init__(self):
        super().__init__()
        self.square = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM) / 2) for _ in range(2))
        self.vector = nn.ParameterList(nn.Parameter(torch.randn(DIM)) for _ in range(2))
        self.linear = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)


OPERATIONS = {
    "linear": lambda pool, x, k: pool.linear[k](x),
    "matmul": lambda pool, x, k: x @ pool.square[k],
    "transposed": lambda pool, x, k: x @ pool.square[k].t(),
    "derived": lambda pool, x, k: x @ (pool.square[k] * 2).tanh(),
    "own": lambda pool, x, k: Product.apply(x, pool.square[k]),
    "bias": lambda pool, x, k: x + pool.vector[k],
    "scale": lambda pool, x, k: x * pool.vector[k],
    "norm": lambda pool, x, k: pool.norm(x),
    "functional norm": lambda pool, x, k: F.rms_norm(x, (DIM,), pool.vector[k]),
    "in place": lambda pool, x, k: torch.relu_(x * 1.5),
    "tanh": lambda pool, x, k: torch.tanh(x),
    "residual": lambda pool, x, k: x + pool.linear[k](torch.sin(x)),
    "attention": lambda pool, x, k: x + (x @ x.transpose(-1, -2)).softmax(-1) @ pool.linear[k](x),
    "embedding": lambda pool, x, k: x + F.embedding((x.detach() > 0).long(), pool.square[k]).sum(-2),
}


def both(make, xs, root=None, steps=2):
    """Run whole and split backwards of the same model; return both results, and why they were not apart."""
    found, reason = [], ""
    for split in (False, True):
        torch.manual_seed(0)
        module, run = make()
        gradients = []
        for _ in range(steps):
            leaves = [x.clone().requires_grad_() for x in xs]
            outputs = run(module, *[leaf * 1.0 for leaf in leaves])
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            edges = [get_gradient_edge(out) for out in outputs]
            roots = [torch.cos(out.detach()) for out in outputs]
            del outputs
            if split:
                inputs, part = input_backward(edges, roots, leaves)
                reason = part.reason
                if not reason and steps == 1:
                    assert all(p.grad is None for p in module.parameters()), "a weight's gradient came too early"
                part.run()
                assert part.is_empty
            else:
                inputs = full_backward(edges, roots, leaves)
            gradients += inputs
        found.append([*gradients, *(p.grad for p in module.parameters())])
    return found, reason


def check(make, xs, steps=2):
    (whole, split), reason = both(make, xs, steps=steps)
    for number, (one, other) in enumerate(zip(whole, split, strict=True)):
        assert (one is None) == (other is None), f"gradient {number}"
        assert one is None or torch.equal(one, other), f"gradient {number} differs"
    return reason


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 1)), min_size=1, max_size=7),
    st.integers(1, 3),
    st.sampled_from(["nothing", "a weight", "of weights", "an input"]),
)
def test_random_graphs_with_shared_weights(words, rows, beside):
    def run(pool, x):
        first = x
        for word, k in words:
            x = OPERATIONS[word](pool, x, k)
        others = {
            "a weight": pool.square[0],
            "of weights": pool.linear[0].weight.t() @ pool.square[1],
            "an input": first,
        }
        return (x, others[beside]) if beside in others else x

    check(lambda: (Pool(), run), [torch.randn(rows, 2, DIM, generator=torch.Generator().manual_seed(rows))])


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 4, 3)),
            (2, 3, 9, 9),
        ),
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=4), nn.GroupNorm(2, 4), nn.SiLU()), (2, 4, 17)),
        (lambda: nn.TransformerEncoderLayer(DIM, 2, 12, 0.0, batch_first=True), (2, 5, DIM)),
        (lambda: nn.Bilinear(DIM, DIM, DIM), (4, DIM)),
    ],
)
def test_modules_as_they_are(make, x):
    def run(module, x):
        return module(x, x.sin()) if isinstance(module, nn.Bilinear) else module(x)

    check(lambda: (make(), run), [torch.randn(x)])


def test_most_modules_are_apart_and_products_wait():
    """Falling back would be right, too, and would fill no bubble."""
    assert check(lambda: (nn.Linear(DIM, DIM), lambda m, x: m(x)), [torch.randn(4, DIM)], steps=1) == ""
    twice = check(lambda: (nn.Linear(DIM, DIM), lambda m, x: m(torch.tanh(m(x)))), [torch.randn(4, DIM)])
    assert twice == ""


def test_several_inputs_and_outputs_some_of_them_unused():
    def run(module, x, y, unused):
        return module(x + y), (y * 2).sin(), module.weight * 3

    check(lambda: (nn.Linear(DIM, DIM), run), [torch.randn(4, DIM) for _ in range(3)])


def test_a_function_of_the_users_own_runs_once():
    Product.runs = 0
    check(lambda: (Pool(), lambda p, x: Product.apply(p.linear[0](x), p.square[0])), [torch.randn(4, DIM)], steps=1)
    assert Product.runs == 2  # once in the whole backward, once in the split one


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_runs_at_once_and_says_so(reentrant):
    runs = []

    def run(module, x):
        def inner(y):
            runs.append(1)
            return torch.tanh(module(y))

        return checkpoint(inner, x, use_reentrant=reentrant)

    reason = check(lambda: (nn.Linear(DIM, DIM), run), [torch.randn(4, DIM)], steps=1)
    assert "checkpointing" in reason
    assert len(runs) == 4  # twice forward, and recomputed once in each backward


def test_a_hook_of_a_weight_runs_once():
    calls = []

    def make():
        module = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM))
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: calls.append(1) or gradient * 2)
        return module, lambda m, x: m(x)

    check(make, [torch.randn(4, DIM)], steps=1)
    assert len(calls) == 12


def test_a_hook_after_accumulation_runs_once():
    calls = []

    def make():
        module = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: calls.append(1))
        return module, lambda m, x: m(x)

    assert check(make, [torch.randn(4, DIM)], steps=1) == ""
    assert len(calls) == 8


def test_without_inputs_everything_is_the_weights_work():
    module = nn.Linear(DIM, DIM)
    out = module(torch.ones(2, DIM))
    inputs, part = input_backward([get_gradient_edge(out)], [torch.ones_like(out)], [])
    assert inputs == ()
    assert module.weight.grad is None
    part.run()
    assert torch.equal(module.weight.grad, torch.full((DIM, DIM), 2.0))


def test_the_graph_is_freed_with_the_weights_part():
    freed = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = type("Kept", (), {"__del__": lambda self: freed.append(1)})()
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    module, leaf = nn.Linear(DIM, DIM), torch.randn(2, DIM, requires_grad=True)
    out = module(Keeps.apply(module(leaf)))
    edges, root = [get_gradient_edge(out)], torch.ones_like(out)
    del out
    _, part = input_backward(edges, [root], [leaf])
    edges.clear()
    assert not freed
    part.run()
    assert freed
