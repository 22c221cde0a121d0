"""weave on one GPU: bit-equal under every strategy, over NCCL on one rank and over the simulated link."""

import contextlib

import pytest
import torch
from layers import HIDDEN, LAYERS, TOKENS, Chunk, Exchange, is_refused, plain, run

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.measure.link import SimulatedLink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STRATEGIES = ["turns", "streams", "auto"]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["nccl", "link"])
def slow_link(request):
    """A group of one takes no turn by itself; over a simulated link it does."""
    engine().close()  # what is a crossing is another matter over the link
    engine().channels.lone_groups_are_slow = request.param == "link"
    with SimulatedLink(200.0, sms=4) if request.param == "link" else contextlib.nullcontext():
        yield request.param
    engine().channels.lone_groups_are_slow = False


# free strands have two compute lanes, and gradients of one weight come from both
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layer", LAYERS)
def test_woven_is_bit_equal_to_serial(layer, strategy, slow_link):
    expected = run(layer, "serial")
    if is_refused(layer, strategy):
        with pytest.raises(tw.TorchweaveError, match="random state"):
            run(layer, strategy)
        return
    got = run(layer, strategy)
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(one, other), f"tensor {index} of {len(expected)} differs"


def test_gradient_penalty_in_the_forward_does_not_wait_for_a_device_thread(slow_link):
    """The forward's autograd.grad meets collectives while the backward is blocked in a turn."""

    def run_penalty(strategy):
        torch.manual_seed(2)
        chunk = Chunk(plain).cuda()

        def forward(x):
            out = chunk(x).square().mean()
            (grad,) = torch.autograd.grad(out, x, create_graph=False)
            return out.detach() + grad.norm()

        results = []
        for _ in range(3):
            x, y = (torch.randn(TOKENS, HIDDEN, device="cuda", requires_grad=True) for _ in range(2))
            loss = chunk(y).square().mean()
            results.append(tw.weave(lambda: forward(x), lambda: loss.backward(), strategy=strategy))
        return [*results, *(parameter.grad for parameter in chunk.parameters())]

    for one, other in zip(run_penalty("serial"), run_penalty("turns"), strict=True):
        assert torch.equal(one, other)


def test_an_error_in_either_strand_is_raised_and_the_next_pair_works(slow_link):
    chunk = Chunk(plain).cuda()

    def pair(fail):
        x, y = (torch.randn(TOKENS, HIDDEN, device="cuda", requires_grad=True) for _ in range(2))
        loss = chunk(y).square().mean()

        def forward():
            out = chunk(x)
            if fail == "forward":
                raise ZeroDivisionError("planted")
            return out

        def backward():
            loss.backward()
            if fail == "backward":
                raise ZeroDivisionError("planted")

        return forward, backward

    for fail in ("", "", "forward", "backward", ""):
        forward, backward = pair(fail)
        with pytest.raises(ZeroDivisionError, match="planted") if fail else contextlib.nullcontext():
            tw.weave(forward, backward, strategy="turns", kind="errors")


def test_peak_memory_is_that_of_both_strands(slow_link):
    """A woven pair holds at most serial's peak and one strand's live activations more."""
    torch.manual_seed(3)
    chunk = Chunk(plain).cuda()

    def peak(strategy):
        # one pair first, so that kinds are known and pools are warm
        for _ in range(2):
            x, y = (torch.randn(16 * TOKENS, HIDDEN, device="cuda", requires_grad=True) for _ in range(2))
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = chunk(y).square().mean()
            activations = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            out = tw.weave(lambda: chunk(x).square().mean(), lambda: loss.backward(), strategy=strategy, kind="memory")
            torch.cuda.synchronize()
            top = torch.cuda.max_memory_allocated()
            assert out.isfinite()
            out = loss = None
        return top, activations

    serial, activations = peak("serial")
    woven, _ = peak("turns")
    assert woven <= serial + activations


def test_a_region_reads_memory_that_the_strand_frees_meanwhile(slow_link):
    """What the region's lane still reads must not be given to the other strand."""

    def layer(linear, x):
        y = linear(x).detach() * 1.0
        with tw.communication():
            torch.cuda._sleep(2_000_000)
            z = y.clone()
            del y
        return Exchange.apply(z + linear(x))

    expected, got = run(layer, "serial"), run(layer, "turns")
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
