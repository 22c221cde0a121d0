"""What traces show: bubbles beside what the simulator says of them, and transfers behind computation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import costs, traces, transfers
from measuring.steps import gathered, in_turn, quartiles

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.measure.dense import DenseLanguageModel, DenseSizes
from torchweave.measure.language import next_byte_loss
from torchweave.measure.link import SimulatedLink
from torchweave.measure.parts import ModelPart
from torchweave.schedule.passes import only_compute
from torchweave.schedule.simulate import simulate
from two_gpu.setup import Setup, alone, before_each, group_with, lone_groups_are_slow, put_over, stages, step_of

MOST_BYTES = 290_000  # of a trace that is kept
# (schedule, ranks of a pipeline, strategies)
CASES = (
    ("dualpipev", 1, ("serial", "turns")),
    ("1f1b", 2, ("serial",)),
    ("zbv", 2, ("serial",)),
    ("dualpipev", 2, ("serial", "turns")),
    ("dualpipe", 2, ("serial", "turns")),
)


def bubbles(setup: Setup) -> None:
    """Steps measured, recorded, and simulated from what their actions cost alone."""
    own = alone()
    model = setup.model(own)
    parameters = list(model.parameters())
    for schedule, ranks, strategies in CASES:
        if setup.is_over():
            return
        together = ranks == 1  # then the experts are over both ranks, and NCCL is their link
        put_over(model, group_with(None, setup.device) if together else own)
        lone_groups_are_slow(not together)
        group = own if together else dist.group.WORLD
        chunks = stages(model, schedule, group)
        with setup.link(not together) as link:
            pipelines = {name: tw.pipeline.build(chunks, schedule, group, strategy=name) for name in strategies}
            count = setup.sizes.counts[0]
            plan = only_compute(pipelines[strategies[-1]].plan(count))
            numbers = pipelines[strategies[-1]].stages
            known = _costs(setup, dict(zip(numbers, chunks, strict=True)), plan.num_stages, link)
            text = setup.rows(count, 1 + (dist.get_rank() if together else 0))
            ways = {name: step_of(pipeline, text, count) for name, pipeline in pipelines.items()}
            times = in_turn(ways, setup.sizes.rounds, setup.device, before=before_each(parameters))
            for name, step in ways.items():
                before_each(parameters)()
                found = traces.record_on_all(step, setup.work, f"{schedule}_{ranks}_{name}", setup.device)
                row = {
                    "schedule": schedule,
                    "ranks_of_a_pipeline": ranks,
                    "strategy": name,
                    "microbatches": count,
                    "costs_ms": costs.said(known),
                    **_beside(plan, known, name, times[name], found[:ranks]),
                }
                setup.report.add(row, _told(row))
        engine().close()


def _costs(setup: Setup, chunks: dict[int, ModelPart], num_stages: int, link: SimulatedLink) -> costs.Costs:
    """Return what the actions of all ranks' stages cost alone, ms."""
    s = setup.sizes
    text = setup.rows(1, 99)
    between = (text.shape[0], s.sequence, s.hidden)

    def enters(is_first: bool) -> torch.Tensor:
        if is_first:
            return text[:, :-1]
        return torch.randn(between, dtype=s.dtype, device=setup.device, requires_grad=True)

    loss_fn = partial(_loss, text[:, 1:])
    mine = {
        index: costs.StageInputs(
            part, partial(enters, part.is_first), loss_fn if part.is_last else None, not part.is_first
        )
        for index, part in chunks.items()
    }
    transfer = torch.zeros(between, dtype=s.dtype, device=setup.device)
    return costs.Costing(link, setup.device, s.rounds).costs(mine, num_stages, transfer)


def _loss(targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return next_byte_loss(logits, targets)


def _beside(plan: Any, known: costs.Costs, name: str, times: list[float], found: list[Path]) -> dict[str, Any]:
    """Return the measured and the recorded step beside the simulated one."""
    simulated = simulate(plan, known, woven=name != "serial")
    recorded = traces.step_of(found)
    low, high = quartiles(times)
    measured_ms = sorted(times)[len(times) // 2]
    return {
        "measured_ms": measured_ms,
        "quartiles_ms": [low, high],
        "simulated_ms": simulated.step_time,
        "simulated_over_measured": simulated.step_time / measured_ms,
        "recorded_ms": recorded.step_time,
        "simulated_over_recorded": simulated.step_time / recorded.step_time,
        "recorded_bubbles": list(recorded.bubble_shares),
        "simulated_bubbles": list(simulated.bubble_shares),
        "bubbles_differ_by": max(
            abs(a - b) for a, b in zip(recorded.bubble_shares, simulated.bubble_shares, strict=True)
        ),
    }


def _told(row: dict[str, Any]) -> str:
    bubbles = " / ".join(f"{share:.1%}" for share in row["recorded_bubbles"])
    said = " / ".join(f"{share:.1%}" for share in row["simulated_bubbles"])
    return (
        f"{row['schedule']} {row['strategy']}: measured {row['measured_ms']:.1f} ms, "
        f"recorded {row['recorded_ms']:.1f}, simulated {row['simulated_ms']:.1f}; bubbles {bubbles}, simulated {said}"
    )


def transfers_hidden(setup: Setup) -> None:
    """NCCL's point-to-point between stages that communicate nothing else: how much of it computation hides."""
    s = setup.sizes
    sizes = DenseSizes(s.layers, s.hidden, 2 * s.hidden, s.sequence)
    model = DenseLanguageModel(sizes, None, dtype=s.dtype, device=setup.device)
    parameters = list(model.parameters())
    for ctas in (None, 4):
        group = group_with(ctas, setup.device)
        for schedule in ("1f1b", "dualpipev", "dualpipe"):
            if setup.is_over():
                return
            pipeline = tw.pipeline.build(stages(model, schedule, group), schedule, group, strategy="serial")
            step = step_of(pipeline, setup.rows(s.counts[0], 1), s.counts[0])
            times = in_turn({"step": step}, s.rounds, setup.device, before=before_each(parameters))["step"]
            before_each(parameters)()
            name = f"two_gpu_transfers_{schedule}"
            found = traces.record_on_all(step, setup.work, name, setup.device)
            row: dict[str, Any] = {
                "schedule": schedule,
                "nccl_ctas": ctas,
                "microbatches": s.counts[0],
                "step_ms": sorted(times)[len(times) // 2],
                "tokens_per_second": s.counts[0] * s.tokens / sorted(times)[len(times) // 2] * 1e3,
                **transfers.transfers_of([transfers.device_work(path) for path in found]),
            }
            if schedule == "dualpipev" and ctas is None:
                row["kept_traces"] = _kept(setup, found)
            setup.report.add(row, f"{schedule}, at most {ctas} CTAs: {row}")


def _kept(setup: Setup, found: list[Path]) -> dict[str, str]:
    """Keep a rank's trace each, small; return the files and what was left out of them."""
    path = found[dist.get_rank()]
    kept = traces.keep_small(path, setup.out / path.name, MOST_BYTES)
    return {path.name: kept for path, kept in zip(found, gathered(kept), strict=True)}
