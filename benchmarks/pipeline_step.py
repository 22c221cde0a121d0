"""The simulator against measured steps: gloo ranks over a simulated link, several schedules, serial and woven.

    python benchmarks/pipeline_step.py --out benchmarks/results/pipeline_step.json

Each rank measures what the actions of its stages cost alone, while the other ranks do the same beside it; the simulator
makes step times of that; and the steps themselves are measured, the strategies in turn, round by round.

By default computation sleeps: it takes its time and no processor, so that a busy machine matters little, and what is
tried is whether runner, weave and simulator wait for the same things. `--computation model` computes a
mixture-of-experts model, and needs a core for each rank that nobody else uses. The file says how far the rounds lie
apart, and how busy the machine was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import costs
from measuring.steps import in_turn

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.measure.language import next_byte_loss
from torchweave.measure.link import SimulatedLink
from torchweave.measure.moe import ModelSizes, MoeLanguageModel
from torchweave.measure.naps import nap
from torchweave.measure.parts import ModelPart, parts_of
from torchweave.measure.training import versions
from torchweave.schedule.passes import only_compute, take_pairs_apart
from torchweave.schedule.simulate import simulate

SCHEDULES = ("1f1b", "zbv", "dualpipev", "dualpipe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="file for the result")
    add("--ranks", type=int, default=2)
    add("--microbatches", type=int, default=8)
    add("--rounds", type=int, default=9)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--tokens", type=int, default=256, help="in a microbatch, in sequences of 128")
    add("--computation", choices=["sleep", "model"], default="sleep")
    add("--link-gbps", type=float, default=0.1, help="speed of the simulated link under all communication")
    add("--schedules", nargs="+", default=list(SCHEDULES))
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29541")
    mp.spawn(rank_main, (args,), args.ranks)


def rank_main(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks, timeout=datetime.timedelta(seconds=120))
    engine().channels.lone_groups_are_slow = True  # each stage's experts are on one rank, behind the link
    alone = dist.new_group([rank], use_local_synchronization=True)
    with SimulatedLink(args.link_gbps) as link:
        rows = [row for schedule in args.schedules for row in measure(schedule, args, alone, link)]
    if rank == 0:
        result = {
            "what": "a training step over gloo ranks and a simulated link, beside what the simulator says",
            "command": "python benchmarks/pipeline_step.py "
            + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(args).items() if name in _SHOWN),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "load_at_the_end": os.getloadavg()[0],
            "versions": versions(torch.device("cpu")),
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        for row in rows:
            print(
                f"{row['schedule']:18s} {row['strategy']:7s} measured {row['measured_ms']:8.1f} ms "
                f"({row['quartiles_ms'][0]:.1f} - {row['quartiles_ms'][1]:.1f}), simulated "
                f"{row['simulated_ms']:8.1f} ms, simulated / measured {row['ratio']:.3f}"
            )
    dist.destroy_process_group()


_SHOWN = ("ranks", "microbatches", "rounds", "layers", "hidden", "tokens", "computation", "link_gbps")


def measure(schedule: str, args: argparse.Namespace, alone: dist.ProcessGroup, link: SimulatedLink) -> list[dict]:
    """Return a row for the serial and for the woven step of a schedule."""
    stages = [tw.pipeline.stages_of(schedule, other, args.ranks) for other in range(args.ranks)]
    num_stages = 1 + max(map(max, stages))
    parts = (Sleeper if args.computation == "sleep" else Model).parts(args, num_stages, alone)
    mine = {index: part for index, part in enumerate(parts) if index in stages[dist.get_rank()]}
    costing = costs.Costing(link, torch.device("cpu"), args.rounds)
    known = costing.costs(
        {index: part.alone() for index, part in mine.items()}, num_stages, torch.zeros(args.tokens, args.hidden)
    )
    inputs, targets = parts[0].batch(args.microbatches)
    chunks = list(mine.values())
    pipelines = {name: tw.pipeline.build(chunks, schedule, strategy=name) for name in ("serial", "turns")}
    plan = only_compute(pipelines["turns"].plan(args.microbatches))
    has_pairs = take_pairs_apart(plan) != plan
    ways = {
        strategy: partial(
            pipelines[strategy].step,
            inputs,
            targets,
            num_microbatches=args.microbatches,
            loss_fn=parts[0].loss_fn,
            keep_outputs=False,
        )
        for strategy in (("serial", "turns") if has_pairs else ("serial",))
    }
    times = in_turn(ways, args.rounds, torch.device("cpu"))
    found = []
    for strategy in ways:
        simulated = simulate(plan, known, woven=strategy == "turns").step_time
        low, measured, high = statistics.quantiles(times[strategy], n=4)
        found.append(
            {
                "schedule": schedule,
                "strategy": strategy,
                "measured_ms": measured,
                "quartiles_ms": [low, high],
                "simulated_ms": simulated,
                "ratio": simulated / measured,
                "costs_ms": {name: getattr(known, name) for name in costs.NAMES},
                "p2p_ms": known.p2p,
                "recovered": known.recovered,
            }
        )
    engine().close()
    return found


class Model(ModelPart):
    """A stage that computes: layers of a mixture-of-experts model, whose experts are behind the link."""

    loss_fn = staticmethod(next_byte_loss)

    @staticmethod
    def parts(args: argparse.Namespace, num_stages: int, alone: dist.ProcessGroup) -> list[Model]:
        sizes = ModelSizes(args.layers, args.hidden, args.hidden, 2, 1, 128)
        model = MoeLanguageModel(sizes, alone, dtype=torch.float32, device=torch.device("cpu"))
        found = parts_of(model, num_stages)
        for part in found:
            part.__class__ = Model
            part.rows, part.hidden = args.tokens // 128, args.hidden
        return found

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(256, (num_microbatches * self.rows, 129))
        return text[:, :-1], text[:, 1:]

    def alone(self) -> costs.StageInputs:
        targets = self.batch(1)[1]
        loss_fn = (lambda y: self.loss_fn(y, targets)) if self.is_last else None
        return costs.StageInputs(self, self.enters, loss_fn, not self.is_first)

    def enters(self) -> torch.Tensor:
        return self.batch(1)[0] if self.is_first else torch.randn(self.rows, 128, self.hidden, requires_grad=True)


class Exchange(torch.autograd.Function):
    """An all-to-all over the link."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient.contiguous(), group=ctx.group)
        return out, None


class Sleeper(torch.nn.Module):
    """A stage that sleeps, exchanges over the link, sleeps, exchanges back, and so on, as layers of experts do."""

    NAP_S = 0.02

    def __init__(self, args: argparse.Namespace, index: int, num_stages: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.shape = group, (args.tokens, args.hidden)
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.exchanges = 2 * (args.layers // num_stages)
        self.scale = torch.nn.Parameter(torch.ones(args.hidden))

    @staticmethod
    def parts(args: argparse.Namespace, num_stages: int, alone: dist.ProcessGroup) -> list[Sleeper]:
        return [Sleeper(args, index, num_stages, alone) for index in range(num_stages)]

    @staticmethod
    def loss_fn(output: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        return output.square().mean() if target is None else (output - target).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nap(x * self.scale, self.NAP_S)
        for _ in range(self.exchanges):
            x = nap(Exchange.apply(x, self.group), self.NAP_S)
        return x

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, None]:
        return torch.ones(num_microbatches * self.shape[0], self.shape[1]), None

    def alone(self) -> costs.StageInputs:
        return costs.StageInputs(self, self.enters, self.loss_fn if self.is_last else None, not self.is_first)

    def enters(self) -> torch.Tensor:
        return torch.ones(self.shape, requires_grad=not self.is_first)


if __name__ == "__main__":
    main()
