"""The adapters in their frameworks' own runners, on both ranks: equal, and tokens per second with and without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measuring import megatron_gpt
from measuring.steps import Equality, in_turn, rates

from torchweave.adapters.megatron import overlapped_forward_backward
from torchweave.engine.pair import engine
from torchweave.measure.language import next_byte_loss
from torchweave.measure.parts import ModelPart, parts_of
from torchweave.measure.subject import deterministic
from two_gpu.setup import SMALL, Setup, alone, clear, lone_groups_are_slow, put_over

ALONE = "alone"  # the framework without weave
STRATEGIES = ("serial", "turns", "auto")


class Patch:
    """Sets attributes for the rest of this process, with the signature of pytest's `MonkeyPatch.setattr`."""

    @staticmethod
    def setattr(owner: Any, name: str, value: Any, raising: bool = True) -> None:  # noqa: ARG004
        setattr(owner, name, value)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss in memory of its own: runners detach it in place."""
    return next_byte_loss(logits, targets).clone()


def compare(
    setup: Setup,
    case: Mapping[str, Any],
    ways: Mapping[str, Callable[[], list[torch.Tensor]]],
    parameters: list[torch.nn.Parameter],
    tokens: int,
    *,
    warn_only: bool = False,
) -> None:
    """Add a row: whether all ways have the losses and gradients of the framework left alone, and how fast they are.

    Args:
        setup: The part's.
        case: What is compared, for the row.
        ways: Each runs a step and returns its losses.
        parameters: The weights whose gradients are compared.
        tokens: Of a step, over all ranks.
        warn_only: Whether kernels that are not deterministic are allowed where there are no others.
    """
    equality = Equality()
    with deterministic(setup.device):
        if warn_only:
            torch.use_deterministic_algorithms(setup.device.type == "cuda", warn_only=True)
        for _ in range(2):  # in the first, kinds of pairs are recorded
            for name, step in ways.items():
                clear(parameters)
                losses = step()
                equality.see(name, [*losses, *(p.grad for p in parameters if p.grad is not None)])
    last: dict[str, list[float]] = {}
    times = in_turn(
        ways,
        setup.sizes.rounds,
        setup.device,
        before=partial(clear, parameters),
        after=lambda name, losses: last.update({name: [loss.item() for loss in losses]}),
        warmup=3,
    )
    clear(parameters)
    row = {**case, **equality.said(), "losses": last, **rates(times, tokens, ALONE)}
    speeds = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["tokens_per_second"].items())
    setup.report.add(row, f"{case}: tokens/s {speeds}; bit-equal {row['bit_equal']}")


def torch_pipelining(setup: Setup) -> None:
    """torch's own ScheduleDualPipeV: one rank a pipeline and experts over both, then two ranks a pipeline."""
    own = alone()
    model = setup.model(own)
    for ranks in (1, 2):
        if setup.is_over():
            return
        together = ranks == 1
        lone_groups_are_slow(not together)
        put_over(model, dist.group.WORLD if together else own)
        group, rank = (own, 0) if together else (dist.group.WORLD, dist.get_rank())
        text = setup.rows(setup.sizes.counts[0], 1 + (dist.get_rank() if together else 0))
        with contextlib.nullcontext() if together else setup.link(simulated=True):
            ways = {
                name: _torch_step(setup, model, ranks, rank, group, text, None if name == ALONE else name)
                for name in (ALONE, *STRATEGIES)
            }
            compare(
                setup,
                {"framework": f"torch {torch.__version__}", "schedule": "ScheduleDualPipeV", "ranks": ranks},
                ways,
                list(model.parameters()),
                setup.sizes.counts[0] * setup.sizes.tokens * (2 if together else 1),
            )
        engine().close()


def _torch_step(
    setup: Setup,
    model: torch.nn.Module,
    ranks: int,
    rank: int,
    group: dist.ProcessGroup,
    text: torch.Tensor,
    strategy: str | None,
) -> Callable[[], list[torch.Tensor]]:
    """Return a step of torch's runner over stages of its own that share the model's weights."""
    from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV

    from torchweave.adapters.torch_pipelining import weave_schedule

    parts = parts_of(model, 2 * ranks)
    stages = [
        PipelineStage(parts[index], index, 2 * ranks, setup.device, group=group)
        for index in (rank, 2 * ranks - 1 - rank)
    ]
    schedule = ScheduleDualPipeV(stages, setup.sizes.counts[0], loss_fn=loss_of)
    if strategy is not None:
        weave_schedule(schedule, strategy=strategy)

    def step() -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        # torch 2.11 refuses a cut of a larger tensor
        arguments = (text[:, :-1].contiguous(),) if rank == 0 else ()
        schedule.step(*arguments, target=text[:, 1:] if rank == 0 else None, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]

    return step


def deepseek(setup: Setup) -> None:
    """DeepSeek's own DualPipe on two ranks, its chunks' class decorated; the stages' experts over a simulated link."""
    import dualpipe

    from torchweave.adapters.deepseek import overlapped

    s, rank = setup.sizes, dist.get_rank()
    rows = s.tokens // s.sequence
    if setup.device.type == "cpu":
        _dualpipe_on_cpu(rows, s)
    own = alone()
    model = setup.model(own)
    dualpipe.set_p2p_tensor_shapes([(rows, s.sequence, s.hidden)])
    dualpipe.set_p2p_tensor_dtype(s.dtype)
    lone_groups_are_slow(True)
    count = s.counts[0]
    # the first half of the microbatches enters at rank 0, the second half at rank 1; the labels at the other one
    halves = [setup.rows(count // 2, 1 + which) for which in range(2)]

    def pipe_with(strategy: str | None) -> Callable[[], list[torch.Tensor]]:
        chunk = type("Chunk", (ModelPart,), {})
        if strategy is not None:
            overlapped(strategy=strategy)(chunk)
        parts = parts_of(model, 2)
        for part in parts:
            part.__class__ = chunk
        pipe = dualpipe.DualPipe((parts[rank], parts[1 - rank]))

        def step() -> list[torch.Tensor]:
            loss, _ = pipe.step(
                halves[rank][:, :-1],
                num_chunks=count,
                criterion=loss_of,
                labels=[halves[1 - rank][:, 1:]],
                return_outputs=False,
            )
            return [] if loss is None else list(loss.detach().unbind())

        return step

    with setup.link(simulated=True):
        ways = {name: pipe_with(None if name == ALONE else name) for name in (ALONE, *STRATEGIES)}
        compare(
            setup,
            {"framework": "dualpipe 1.0.0", "schedule": "DualPipe", "ranks": 2},
            ways,
            list(model.parameters()),
            count * s.tokens,
        )
    engine().close()


def _dualpipe_on_cpu(rows: int, sizes: Any) -> None:
    """Let the package run without CUDA: it asks for the current device, and allocates on it."""
    from dualpipe import comm

    def build() -> list[torch.Tensor]:
        return [torch.empty(rows, sizes.sequence, sizes.hidden, dtype=sizes.dtype, requires_grad=True)]

    Patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    Patch.setattr(comm, "build_from_tensor_shapes", build)


def megatron(setup: Setup) -> None:
    """A GPT of megatron-core without Transformer Engine: its layers over both ranks, then its experts."""
    on_cpu = setup.device.type == "cpu"
    if on_cpu:
        megatron_gpt.on_cpu(Patch)
    megatron_gpt.without_transformer_engine(Patch)
    is_small = setup.sizes == SMALL
    text = megatron_gpt.Text() if is_small else megatron_gpt.Text(1024, 2, 1024, 8)
    more = {} if is_small else {"num_layers": 4, "hidden_size": 2048, "num_attention_heads": 16}
    for tensor, expert in ((2, 1), (1, 2)):
        if setup.is_over():
            return
        with megatron_gpt.groups_of_ranks(tensor, expert):
            gpt = megatron_gpt.Gpt(tensor, expert, setup.device, text=text, **more)
            parameters = [parameter for chunk in gpt.chunks for parameter in chunk.parameters()]
            pairs = {ALONE: megatron_gpt.plain_pair}
            pairs |= {name: partial(overlapped_forward_backward, strategy=name) for name in STRATEGIES}
            compare(
                setup,
                {"framework": "megatron-core", "tensor_parallel": tensor, "expert_parallel": expert, **text._asdict()},
                {name: partial(_megatron_step, gpt, pair) for name, pair in pairs.items()},
                parameters,
                text.microbatches * text.batch * text.length * (1 if tensor > 1 else 2),
                warn_only=True,
            )
        engine().close()


def _megatron_step(gpt: megatron_gpt.Gpt, pair: Callable[..., Any]) -> list[torch.Tensor]:
    # the same random numbers each time: dropout is drawn anew in every step
    torch.manual_seed(7)
    return [loss.detach() for loss in gpt.run(pair)]
