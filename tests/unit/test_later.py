"""Weight gradients later: the same bits, behind the next communication, and left alone where they cannot be apart."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchweave.engine import later as later_module
from torchweave.engine.later import Later, find_products
from torchweave.errors import NotWeavableError

WIDTH = 8

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]


class Crossing(torch.autograd.Function):
    """Where a backward starts communication and then waits."""

    @staticmethod
    def forward(ctx, x, at_wait):
        ctx.at_wait = at_wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.at_wait()
        return grad * 1, None


class Chunk(nn.Module):
    """Layers with a crossing before each, as `turns` meets them in a backward."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.at_wait = lambda: None

    def forward(self, x):
        for layer in self.layers:
            x = layer(Crossing.apply(x, lambda: self.at_wait()))
        return x


class Product(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return (
            torch.bmm(x.expand(self.weight.shape[0], *x.shape[-2:]), self.weight)
            if self.weight.dim() == 3
            else x @ self.weight
        )


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.linear(x).sin())


class Tied(nn.Module):
    """One weight as a table to look up, and as a product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return F.embedding(torch.arange(4), self.weight) + x @ self.weight.t()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.linear, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=self.reentrant)


class Autocast(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x).float()


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.linear(x)


class Added(nn.Module):
    """A product with a sum that counts differently."""

    def __init__(self, alpha):
        super().__init__()
        self.linear, self.alpha = nn.Linear(WIDTH, WIDTH), alpha

    def forward(self, x):
        return torch.addmm(self.linear.bias, x, self.linear.weight, alpha=self.alpha)


def linear(**kwargs):
    return nn.Linear(WIDTH, WIDTH, **kwargs)


def hooked(kind):
    layer, seen = linear(), []
    if kind == "leaf":
        layer.weight.register_hook(lambda grad: grad * 2)
    elif kind == "accumulated":
        layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    elif kind == "module":
        layer.register_full_backward_hook(lambda module, *_: seen.append(module.weight.grad))
    return layer


def frozen():
    layer = linear()
    layer.weight.requires_grad_(False)
    return layer


# how many products can wait in three layers of a kind, whose input needs no gradient: the lowest one cannot, unless it
# has a bias, because nothing else would make the engine run it
MODELS = {
    "linear": (linear, 3),
    "without_bias": (lambda: linear(bias=False), 2),
    "product": (lambda: Product(WIDTH, WIDTH), 2),
    "batched_product": (lambda: Product(2, WIDTH, WIDTH), 2),
    "autocast": (lambda: Autocast(linear()), 3),
    "sum_of_one": (lambda: Added(1), 3),
    "perceptron": (lambda: nn.Sequential(linear(), nn.GELU(), linear(bias=False), nn.LayerNorm(WIDTH)), 6),
    "attention": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True), None),
    "used_twice": (Twice, 0),
    "tied": (Tied, 0),
    "scaled_sum": (lambda: Added(0.5), 0),
    "frozen_weight": (frozen, 0),
    "hook_on_the_weight": (lambda: hooked("leaf"), 0),
    "hook_after_adding": (lambda: hooked("accumulated"), 0),
    "hook_on_the_module": (lambda: hooked("module"), 0),
    "checkpoint": (lambda: Checkpointed(False), 0),
    "reentrant_checkpoint": (lambda: Checkpointed(True), 0),
    "saved_elsewhere": (Packed, 0),
    "convolution": (lambda: nn.Conv1d(4, 4, 3, padding=1), 0),
}


@pytest.fixture
def later(monkeypatch):
    """Put off whatever a backward may put off."""
    one, plain = Later(), torch.autograd._engine_run_backward
    monkeypatch.setattr(
        torch.autograd, "_engine_run_backward", lambda *args, **kwargs: one.run_backward(plain, args, kwargs)
    )
    return one


def make(kind, seed=0):
    torch.manual_seed(seed)
    model = Chunk([MODELS[kind][0]() for _ in range(3)])
    return model, torch.randn(2, 4, WIDTH) if kind in ("attention", "perceptron", "batched_product") else torch.randn(
        4, WIDTH
    )


def gradients(model, x, num_backwards=1, **kwargs):
    for _ in range(num_backwards):
        model(x).square().sum().backward(**kwargs)
    found = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [*found, ("x", x.grad)]


def check_equal(one, other):
    assert [name for name, _ in one] == [name for name, _ in other]
    for (name, found), (_, expected) in zip(one, other, strict=True):
        assert (found is None) == (expected is None), name
        if found is not None:
            assert torch.equal(found, expected), name
            assert found.stride() == expected.stride(), name


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("with_input", [False, True], ids=["leaf_weights_alone", "input_too"])
def test_every_gradient_has_the_same_bits(kind, with_input, monkeypatch):
    """Catches a formula or a sum that differs from autograd's, and weights that are forgotten."""
    if kind == "reentrant_checkpoint" and not with_input:
        pytest.skip("such a checkpoint needs an input that requires a gradient")
    model, x = make(kind)
    expected = gradients(model, x.requires_grad_(with_input), num_backwards=2)
    one, plain = Later(), torch.autograd._engine_run_backward
    monkeypatch.setattr(
        torch.autograd, "_engine_run_backward", lambda *args, **kwargs: one.run_backward(plain, args, kwargs)
    )
    model, x = make(kind)
    model.at_wait = one.catch_up
    check_equal(gradients(model, x.requires_grad_(with_input), num_backwards=2), expected)


@pytest.mark.parametrize("kind", [kind for kind, (_, number) in MODELS.items() if number is not None])
def test_only_what_can_wait_waits(kind):
    """Catches a kind of weight that is put off although somebody else needs it, or never put off at all."""
    model, x = make(kind)
    products, leaves = find_products([model(x).square().sum().grad_fn])
    assert len(products) == MODELS[kind][1]
    if products:
        num_leaves = sum(parameter.requires_grad for parameter in model.parameters())
        assert len(products) + len(leaves) == num_leaves


def test_weights_are_computed_after_the_next_communication_has_started(later):
    """Catches a backward that starts its communication no earlier than a plain one."""
    model, x = make("without_bias")
    seen = []

    def at_wait():
        seen.append([layer.weight.grad is not None for layer in model.layers])
        later.catch_up()

    model.at_wait = at_wait
    # with a gradient to the input all weights can wait
    model(x.requires_grad_()).square().sum().backward()
    assert seen == [[False, False, False], [False, False, True], [False, True, True]]
    assert all(layer.weight.grad is not None for layer in model.layers)


def test_nothing_is_left_when_backward_returns(later):
    """Catches a program that reads gradients after backward() and finds none."""
    model, x = make("linear")
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("option", ["retain_graph", "create_graph", "inputs", "grad", "anomaly"])
def test_a_backward_that_asks_for_more_is_left_alone(option, later):
    """Catches a graph that is kept for another backward and lacks its weights."""
    model, x = make("linear")
    asked = []
    later._put_off = lambda *_: asked.append(1)
    loss = model(x).square().sum()
    if option == "grad":
        torch.autograd.grad(loss, list(model.parameters()))
    elif option == "inputs":
        loss.backward(inputs=[model.layers[0].weight])
    elif option == "anomaly":
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
            loss.backward()
    else:
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward(**{option: True})
        check_equal([("", p.grad) for p in model.parameters()], [("", grad) for grad in grads])
        model.zero_grad()
    assert not asked


def test_memory_goes_as_pieces_are_done(later):
    """Catches activations that live until the whole backward has ended."""
    model, x = make("without_bias")
    alive = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept = x * 1
            alive.append(weakref.ref(kept))
            return kept

        @staticmethod
        def backward(ctx, grad):
            return grad

    model.layers.insert(2, nn.Sequential())
    model.layers[2].forward = Watch.apply
    seen = []

    def at_wait():
        later.catch_up()
        gc.collect()
        seen.append(alive[0]() is not None)

    model.at_wait = at_wait
    model(x.requires_grad_()).square().sum().backward()
    assert seen[0] is False


def test_a_backward_from_several_places_reaches_all_of_them(later):
    """Catches a leaf among the places where a backward begins that gets no gradient."""
    found = []
    for puts_off in (False, True):
        model, x = make("linear")
        later._inside = not puts_off
        alone = torch.ones(3, requires_grad=True)
        ends = [model(x).sum(), alone, model.layers[0](x).square()]
        torch.autograd.backward(ends, [None, torch.full((3,), 2.0), torch.ones(4, WIDTH)])
        found.append([("alone", alone.grad), *((name, p.grad) for name, p in model.named_parameters())])
    check_equal(*found)


@pytest.mark.parametrize("kind", ["without_bias", "product", "batched_product"])
def test_a_first_gradient_is_not_copied(kind, later, monkeypatch):
    """Catches memory and time for a copy of every weight's gradient, which a plain backward does not make."""
    model, x = make(kind)
    model.at_wait = later.catch_up
    made = []
    compute = later_module._compute

    def watched(piece):
        kind = piece.product.kind
        piece = piece._replace(
            product=piece.product._replace(
                kind=kind._replace(gradient=lambda *args: made.append(kind.gradient(*args)) or made[-1])
            )
        )
        compute(piece)
        made[-1] = made[-1].untyped_storage().data_ptr()

    monkeypatch.setattr(later_module, "_compute", watched)
    model(x.requires_grad_()).square().sum().backward()
    grads = [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert sorted(made) == sorted(grads)


class Changed(torch.autograd.Function):
    """Changes in place the gradient that came in, as code does that ignores autograd's rules, or a collective."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.change(grad)
        return grad, None


def with_change(model, x, change):
    """Return a loss whose gradient reaches a product, and after it something that changes it."""
    passed = Changed.apply(x, change)
    return (passed + model.layers[0](x)).sin().sum()


def test_a_gradient_that_somebody_else_changes_is_told(later):
    """Catches a weight gradient of other numbers than a plain backward's."""
    model, x = make("without_bias")
    with pytest.raises(NotWeavableError, match="change a gradient in place"):
        with_change(model, x.requires_grad_(), lambda grad: grad.mul_(2)).backward()


def test_what_a_collective_would_write_over_is_computed_before(later):
    """Catches an all-reduce in place, which no version counter tells."""
    found = []
    for puts_off in (False, True):
        model, x = make("without_bias")
        later._inside = not puts_off

        def reduce(grad):
            later.spare([[grad], object()])
            grad.data.mul_(2)  # not counted, as c10d's are not

        with_change(model, x.requires_grad_(), reduce).backward()
        found.append([("weight", model.layers[0].weight.grad), ("x", x.grad)])
    check_equal(*found)


def test_other_memory_is_no_reason_to_hurry(later):
    """Catches every collective ending the wait of what has nothing to do with it."""
    model, x = make("without_bias")
    seen = []

    def at_wait():
        later.spare((torch.ones(3), [[torch.ones(2)]]))
        seen.append(len(later._pieces))

    model.at_wait = at_wait
    model(x.requires_grad_()).square().sum().backward()
    assert seen == [1, 2, 3]


def test_a_failing_backward_leaves_nothing_behind(later):
    """Catches weight gradients of a failed backward that the next one computes."""
    model, x = make("linear")

    def fail():
        raise KeyError("planted")

    model.at_wait = fail
    with pytest.raises(KeyError, match="planted"):
        model(x.requires_grad_()).square().sum().backward()
    assert later._pieces == []
    model.zero_grad()
    x.grad = None
    model.at_wait = later.catch_up
    found = gradients(model, x)
    other, y = make("linear")
    check_equal(found, gradients(other, y.requires_grad_()))


def test_a_part_without_a_gradient_stays_without(later):
    """Catches a weight that gets zeros where a plain backward gives it nothing."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return None

    found = []
    for puts_off in (False, True):
        model, x = make("linear")
        model.at_wait = later.catch_up
        later._inside = not puts_off
        (Nothing.apply(model(x.requires_grad_())).sum() + x.sum()).backward()
        found.append([("", parameter.grad) for parameter in model.parameters()])
    check_equal(*found)
    assert [grad for _, grad in found[0]][-2:] == [None, None]
