"""The adapters on one GPU and one rank: bit-equal to the framework left alone, over the simulated link.

DeepSeek's package itself needs an even number of ranks, so that here its place is taken by the stand-in for DualPipeV.
"""

import functools
import importlib.util

import pytest
import torch
from adapter_cases import overlapped_ns
from layers import Exchange
from one_rank_v import OneRankV
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV

from torchweave.adapters.deepseek import overlapped
from torchweave.adapters.torch_pipelining import weave_schedule
from torchweave.engine.pair import engine
from torchweave.measure.link import SimulatedLink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # free strands have two compute lanes, and gradients of one weight come from both
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

HIDDEN, TOKENS, NUM_MICROBATCHES, NUM_STEPS = 512, 256, 4, 2
STRATEGIES = ["turns", "streams", "auto"]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def slow_link():
    """Collectives of one rank that take long enough to be worth hiding."""
    engine().close()
    engine().channels.lone_groups_are_slow = True
    with SimulatedLink(200.0, sms=4):
        yield
    engine().channels.lone_groups_are_slow = False


class Chunk(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        for linear in self.linears:
            x = Exchange.apply(torch.tanh(linear(x)))
        return x * 1.0


def loss_fn(output, target):
    return (output - target).square().mean().clone()


def through_torch(chunk, strategy):
    chunks = [chunk().cuda() for _ in range(2)]
    stages = [PipelineStage(one, index, 2, torch.device("cuda", 0)) for index, one in enumerate(chunks)]
    schedule = ScheduleDualPipeV(stages, NUM_MICROBATCHES, loss_fn)
    if strategy is not None:
        weave_schedule(schedule, strategy=strategy)

    def step(x, target):
        losses = []
        return [schedule.step(x, target=target, losses=losses), *losses]

    return chunks, step


def through_deepseek(chunk, strategy):
    cls = type("Decorated", (chunk,), {})
    if strategy is not None:
        overlapped(strategy=strategy)(cls)
    chunks = [cls().cuda() for _ in range(2)]
    pipe = OneRankV(chunks)
    return chunks, lambda x, target: pipe.step(x, num_chunks=NUM_MICROBATCHES, criterion=loss_fn, labels=target)


def run(adapter, strategy):
    """Return every loss, output and gradient of some steps, and how long the strands overlapped on the host, ns."""
    torch.manual_seed(1)
    chunks, step = adapter(Chunk, strategy)
    told, overlaps = [], []
    for _ in range(NUM_STEPS):
        x, target = (torch.randn(NUM_MICROBATCHES * TOKENS, HIDDEN, device="cuda") for _ in range(2))
        with engine().observe() as log:
            told += [value.detach().clone() for value in step(x, target)]
        overlaps.append(overlapped_ns(log.spans))
        for chunk in chunks:
            told += [parameter.grad.clone() for parameter in chunk.parameters()]
            chunk.zero_grad()
    torch.cuda.synchronize()
    return [value.cpu() for value in told], overlaps


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapter", [through_torch, through_deepseek])
def test_a_v_on_one_rank_is_bit_equal_to_itself_left_alone(adapter, strategy, slow_link):
    expected, nothing = run(adapter, None)
    found, overlaps = run(adapter, strategy)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), f"tensor {index} of {len(expected)} differs"
    assert nothing == [0] * NUM_STEPS
    assert overlaps[-1] > 0 or strategy != "turns", overlaps


@pytest.fixture(scope="module")
def megatron_groups(group):
    """Made once: NCCL took about a minute to leave the groups that Megatron makes for twelve models."""
    from measuring.megatron_gpt import groups_of_ranks

    with groups_of_ranks(1, 1):
        yield


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.filterwarnings("ignore")  # Megatron's, about Apex, Transformer Engine and its own next version
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_mixture", [False, True], ids=["dense", "mixture of experts"])
def test_a_gpt_of_megatron_trains_alike_with_and_without_weave(strategy, is_mixture, megatron_groups):
    """On one rank Megatron's layers communicate nothing: what is shown is that its own CUDA parts bear two strands."""
    from measuring.megatron_gpt import EXPERTS, Gpt, plain_pair, without_transformer_engine

    from torchweave.adapters.megatron import overlapped_forward_backward

    def train(pair):
        model = Gpt(1, 1, "cuda", **(EXPERTS if is_mixture else {}))
        return [model.step(pair) for _ in range(3)]

    with pytest.MonkeyPatch.context() as patch:
        without_transformer_engine(patch)
        expected = train(plain_pair)
        found = train(functools.partial(overlapped_forward_backward, strategy=strategy))
    for (losses, grads), (other_losses, other_grads) in zip(expected, found, strict=True):
        assert losses == other_losses
        assert all(torch.equal(one, other) for one, other in zip(grads, other_grads, strict=True))
