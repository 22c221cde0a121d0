"""One contract for all adapters: each in its own framework's order of calls, against forward and backward by hand.

The same two chunks, microbatches and labels go through every adapter on one rank, in pairs, as in the main step of a V:
the forward of one chunk with the backward of the other.
"""

import collections
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV

import torchweave as tw
from torchweave.adapters import deepseek, megatron
from torchweave.adapters.torch_pipelining import weave_schedule
from torchweave.engine import pair as engine_pair

NUM_MICROBATCHES, ROWS, DIM = 5, 3, 5


class PlantedError(Exception):
    """An error of the user's own."""


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chunk):
        ctx.chunk = chunk
        return chunk.cross("forward", x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.chunk.cross("backward", grad), None


class Chunk(nn.Module):
    """A chunk that communicates in the middle, both ways, and that may fail there.

    Args:
        log: What ran, by direction and thread.
        outputs: `one`; `passed on` (a second one without a graph, of another dtype); or `unused` (a second one with a
            graph that nobody uses, so that its gradient is None).
    """

    def __init__(self, log, outputs):
        super().__init__()
        self.up, self.down, self.log, self.outputs = nn.Linear(DIM, 7), nn.Linear(7, DIM), log, outputs
        self.fails, self.received = "", None

    def cross(self, direction, x):
        self.log.append((direction, threading.current_thread(), self))
        num_calls = sum(chunk is self and other == direction for other, _, chunk in self.log)
        # in a pair in every adapter: the first and last ones stand alone, and torch learns its shapes in one before
        if self.fails == direction and num_calls == 4:
            raise PlantedError(f"planted in the {direction}")
        with tw.communication(x):
            return x.clone()

    def set_input_tensor(self, tensors):
        self.received = tensors

    def forward(self, x, extra=None, scale=None):
        hidden = _Crossing.apply(torch.tanh(self.up(x)), self)
        y = self.down(hidden) if scale is None else scale * self.down(hidden)
        if self.outputs == "one":
            return y
        if self.outputs == "unused":
            return y, hidden.sum(1)
        return y, torch.arange(ROWS) if extra is None else extra


def criterion(output, *rest):
    return (output - rest[-1]).square().mean().clone()


class Case:
    """Chunks, microbatches and labels, the same each time."""

    def __init__(self, outputs="one", scale=None):
        torch.manual_seed(3)
        # no list: the engine would take it for state that both strands change
        self.log, self.scale = collections.deque(), scale
        self.chunks = [Chunk(self.log, outputs), Chunk(self.log, outputs)]
        self.x = torch.randn(NUM_MICROBATCHES * ROWS, DIM)
        self.labels = torch.randn(NUM_MICROBATCHES * ROWS, DIM)
        self.parts = list(zip(self.x.chunk(NUM_MICROBATCHES), self.labels.chunk(NUM_MICROBATCHES), strict=True))

    def more(self):
        """What goes to the first chunk besides its input."""
        return () if self.scale is None else (None, self.scale)

    def told(self, losses, outputs):
        """Return everything that has to be the same."""
        grads = [parameter.grad for chunk in self.chunks for parameter in chunk.parameters()]
        return [torch.stack([loss.detach() for loss in losses]), outputs.detach(), grads]


def as_list(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def by_hand(case):
    losses, results = [], []
    for x, label in case.parts:
        outputs = as_list(case.chunks[0](x, *case.more()))
        inputs = [leaf_of(output) for output in outputs]
        final = as_list(case.chunks[1](*inputs))
        loss = criterion(*final, label)
        loss.backward()
        wanted = [(output, leaf.grad) for output, leaf in zip(outputs, inputs, strict=True) if leaf.grad is not None]
        torch.autograd.backward(*zip(*wanted, strict=True))
        losses.append(loss)
        results.append(final[0])
    return case.told(losses, torch.cat(results))


def leaf_of(output):
    return output.detach().requires_grad_(output.requires_grad)


def in_a_v(case, pair):
    """Run the V's main step with a framework's pair of chunk, inputs, label, loss1, outputs1 and their gradients."""
    losses, results, loss, outputs, leaves = [], [], None, [], []
    for x, label in case.parts:
        new_outputs, _ = pair(case.chunks[0], [x, *case.more()], None, loss, [], [])
        new_leaves = [leaf_of(output) for output in new_outputs]
        for output in new_outputs:
            if output.requires_grad:
                output.data = torch.empty(0)  # as a pipeline does with what it has sent
        final, loss = pair(case.chunks[1], new_leaves, label, None, outputs, [leaf.grad for leaf in leaves])
        outputs, leaves = new_outputs, new_leaves
        losses.append(loss)
        results.append(final[0])
    pair_end(loss, outputs, leaves)
    return case.told(losses, torch.cat([result.detach() for result in results]))


def pair_end(loss, outputs, leaves):
    """The last backwards, which have no forward beside them."""
    loss.backward()
    wanted = [(output, leaf.grad) for output, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
    torch.autograd.Variable._execution_engine.run_backward(
        *zip(*wanted, strict=True), keep_graph=False, create_graph=False, allow_unreachable=True, accumulate_grad=True
    )


def through_deepseek(case, strategy):
    for chunk in case.chunks:
        chunk.__class__ = deepseek.overlapped(strategy=strategy)(type("Decorated", (Chunk,), {}))

    def pair(chunk, inputs, label, loss1, outputs1, grads1):
        hook = type(chunk).overlapped_forward_backward
        return hook(
            chunk, inputs, criterion if label is not None else None, [label] if label is not None else [],
            None, loss1, outputs1, grads1,
        )  # fmt: skip

    return in_a_v(case, pair)


def through_megatron(case, strategy):
    def step(inputs, module):
        if module is not last:
            return module(*inputs), None
        *inputs, label, mask = inputs
        assert mask is None
        return module(*inputs), lambda output: (criterion(output, label), {})

    def pair(chunk, inputs, label, loss1, outputs1, grads1):
        hook = megatron.overlapped_forward_backward
        is_last = label is not None
        return hook(chunk, inputs, label, None, loss1, outputs1, grads1, step, is_last, strategy=strategy)

    last = case.chunks[1]
    return in_a_v(case, pair)


def through_torch(case, strategy):
    stages = [PipelineStage(chunk, index, 2, torch.device("cpu")) for index, chunk in enumerate(case.chunks)]

    def loss_fn(outputs, label):
        return criterion(*as_list(outputs), label)

    schedule = ScheduleDualPipeV(stages, NUM_MICROBATCHES, loss_fn, scale_grads=False)
    weave_schedule(schedule, strategy=strategy)
    losses: list = []
    # keyword arguments go to both stages, so that only one of them may scale
    scale = {} if case.scale is None else {"scale": case.scale}
    case.chunks[1].register_forward_pre_hook(lambda _, args, kwargs: (args, {}), with_kwargs=True)
    output = schedule.step(case.x, target=case.labels, losses=losses, **scale)
    return case.told(losses, as_list(output)[0])


ADAPTERS = pytest.mark.parametrize("adapter", [through_deepseek, through_megatron, through_torch])


@pytest.fixture(scope="module", autouse=True)
def group():
    """One rank, which torch's stages ask for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The strategies that adapters ask `weave` for."""
    strategies, weave = [], engine_pair.weave

    def recording(forward, backward, *, strategy="auto"):
        strategies.append(strategy)
        return weave(forward, backward, strategy=strategy)

    monkeypatch.setattr(engine_pair, "weave", recording)
    yield strategies
    engine_pair.engine().close()


def assert_same(given, wanted):
    torch.testing.assert_close(given, wanted, rtol=0, atol=0)


@ADAPTERS
@pytest.mark.parametrize("strategy", ["serial", "turns", "streams", "auto"])
def test_outputs_losses_and_gradients_are_those_by_hand(adapter, strategy, asked):
    """Catches a loss, a gradient or an output that goes to another microbatch, is doubled or lost."""
    case = Case()
    assert_same(adapter(case, strategy), by_hand(Case()))
    assert asked
    assert set(asked) == {strategy}
    if strategy == "turns":
        workers = {thread for direction, thread, _ in case.log if direction == "backward"} - {threading.main_thread()}
        assert workers, "no backward ran beside a forward: nothing was woven"


@ADAPTERS
@pytest.mark.parametrize("outputs", ["passed on", "unused"])
def test_outputs_without_a_gradient_are_left_out(adapter, outputs):
    """Catches None gradients, and outputs without a graph, that reach autograd."""
    assert_same(adapter(Case(outputs), "turns"), by_hand(Case(outputs)))


@ADAPTERS
def test_arguments_that_are_no_tensors_reach_the_chunk(adapter):
    """Catches an adapter that takes arguments apart, or keeps only tensors."""
    assert_same(adapter(Case(scale=0.5), "turns"), by_hand(Case(scale=0.5)))


@ADAPTERS
@pytest.mark.parametrize("side", ["forward", "backward"])
@pytest.mark.parametrize("index", [0, 1])
def test_an_error_of_either_side_comes_out(adapter, side, index):
    """Catches an error that is swallowed or loses its type; torch wraps it in one of its own, as without weave."""
    case = Case()
    case.chunks[index].fails = side
    with pytest.raises((PlantedError, RuntimeError)) as caught:
        adapter(case, "turns")
    error, story = caught.value, []
    while error is not None:
        story.append(error)
        error = error.__cause__ or error.__context__
    assert any(isinstance(one, PlantedError) and str(one) == f"planted in the {side}" for one in story), story
    assert isinstance(caught.value, PlantedError) or adapter is through_torch


@ADAPTERS
def test_after_an_error_the_next_run_is_right(adapter):
    """Catches an engine that an error in an adapter leaves in another state."""
    case = Case()
    case.chunks[0].fails = "backward"
    with pytest.raises((PlantedError, RuntimeError)):
        adapter(case, "turns")
    assert_same(adapter(Case(), "turns"), by_hand(Case()))
