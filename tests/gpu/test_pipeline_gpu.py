"""A pipeline on one GPU: both chunks of a V schedule on one rank, woven over the simulated link, equal to serial."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.errors import PipelineError, UsageError
from torchweave.measure.language import next_byte_loss
from torchweave.measure.link import SimulatedLink
from torchweave.measure.moe import ModelSizes, MoeLanguageModel
from torchweave.measure.parts import parts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = ModelSizes(layers=2, hidden=256, ffn=256, experts_per_rank=2, top_k=2, sequence=64)


@pytest.fixture(autouse=True)
def slow_link():
    engine().close()
    engine().channels.lone_groups_are_slow = True
    torch.use_deterministic_algorithms(True)
    with SimulatedLink(200.0, sms=4):
        yield
    engine().channels.lone_groups_are_slow = False
    torch.use_deterministic_algorithms(False)


def steps(schedule, strategy, dtype=torch.float32):
    """Return the losses and gradients of some steps."""
    device = torch.device("cuda", 0)
    model = MoeLanguageModel(SIZES, dist.group.WORLD, dtype=dtype, device=device)
    num_stages = len(tw.pipeline.stages_of(schedule, 0, 1))
    pipeline = tw.pipeline.build(parts_of(model, num_stages), schedule, strategy=strategy)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        text = torch.randint(256, (6 * 2, 65), generator=generator).to(device)
        loss, _ = pipeline.step(text[:, :-1], text[:, 1:], num_microbatches=6, loss_fn=next_byte_loss)
        found.append([loss.clone(), *(p.grad.clone() for p in model.parameters())])
    return found


@pytest.mark.parametrize("schedule", ["dualpipev", "zbv", "1f1b"])
@pytest.mark.parametrize("strategy", ["turns", "streams", "auto"])
def test_woven_steps_are_serial_ones(schedule, strategy):
    for one, other in zip(steps(schedule, "serial"), steps(schedule, strategy), strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def test_bfloat16():
    for one, other in zip(
        steps("dualpipev", "serial", torch.bfloat16), steps("dualpipev", "turns", torch.bfloat16), strict=True
    ):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def test_a_loss_that_is_no_number_is_found_at_the_end_of_the_step():
    pipeline = tw.pipeline.build(nn.Linear(4, 4).cuda(), "1f1b")
    x = torch.ones(4, 4, device="cuda")
    x[2] = float("nan")
    with pytest.raises(PipelineError) as caught:
        pipeline.step(x, num_microbatches=4, loss_fn=lambda out: out.mean())
    assert (caught.value.stage, caught.value.action, caught.value.microbatch) == (0, "0F2", 2)


def test_stages_on_another_device_than_the_groups():
    with pytest.raises(UsageError, match="NCCL"):
        tw.pipeline.build(nn.Linear(4, 4), "1f1b")
