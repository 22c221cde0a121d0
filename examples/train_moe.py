"""Train a byte-level mixture-of-experts language model with a pipeline, on the text that Python itself ships.

    torchrun --nproc-per-node 4 examples/train_moe.py --schedule dualpipe --pp 4 --ep 1 --steps 200

pp x ep ranks, on GPUs where there is one for each, else on CPUs. Without torchrun it is one process (--pp 1 --ep 1).
The losses are the same for every schedule and for one process: to the last bit where a stage's gradients are added
microbatch by microbatch; dualpipe adds up two halves, and rounds otherwise in the last places.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.errors import UsageError
from torchweave.intervals import difference, length, union
from torchweave.measure.c10d import POINT_TO_POINT
from torchweave.measure.hidden import profile_of
from torchweave.measure.language import next_byte_loss
from torchweave.measure.link import SimulatedLink
from torchweave.measure.moe import ModelSizes, MoeLanguageModel
from torchweave.measure.parts import parts_of
from torchweave.measure.text import Batches, python_text
from torchweave.reporting.output import check_output
from torchweave.schedule.build import names


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--schedule", choices=names(), default="dualpipev")
    add("--pp", type=int, default=1, help="ranks of the pipeline (default: 1)")
    add("--ep", type=int, default=1, help="ranks that share a stage's experts, each with its own text (default: 1)")
    add("--steps", type=int, default=200)
    add("--microbatches", type=int, default=8, help="of a step (default: 8)")
    add("--batch", type=int, default=4, help="sequences in a microbatch (default: 4)")
    add("--sequence", type=int, default=64, help="bytes in a sequence (default: 64)")
    add("--layers", type=int, default=8)
    add("--hidden", type=int, default=64, help="a multiple of 64 (default: 64)")
    add("--experts", type=int, default=4, help="of a layer, over all --ep ranks (default: 4)")
    add("--lr", type=float, default=3e-3)
    add("--strategy", choices=["auto", "turns", "streams", "serial"], default="auto", help="how pairs are woven")
    add("--link-gbps", type=float, help="simulate a link of so many gigabits a second under all communication")
    add("--limit-s", type=float, help="seconds after which a silent rank is given up (default: the backend's)")
    add("--json", type=Path, help="file to which each step's numbers are appended, one JSON object a line")
    add("--checkpoints", type=Path, help="folder for checkpoints; the newest one in it is gone on from")
    add("--save-every", type=int, default=50, help="steps from one checkpoint to the next (default: 50)")
    return parser.parse_args(words)


def join(num_ranks: int, limit_s: float | None = None) -> torch.device:
    """Enter the process group that torchrun's environment names, or one of this process alone."""
    if limit_s is not None and not limit_s > 0:
        raise UsageError("--limit-s is a time above 0 seconds", given=str(limit_s), remedy="leave it out")
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if world != num_ranks:
        raise UsageError(
            "There are --pp times --ep ranks",
            given=f"{world} where {num_ranks} are needed",
            remedy=f"torchrun --nproc-per-node {num_ranks} examples/train_moe.py ...",
        )
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if has_gpus else torch.device("cpu")
    options = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if limit_s is not None:
        options["timeout"] = datetime.timedelta(seconds=limit_s)
    if has_gpus:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products
        torch.use_deterministic_algorithms(True)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group("gloo", **options)
    return device


class Training:
    """The model, the pipeline and the optimizer of one rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        mesh = init_device_mesh(device.type, (args.pp, args.ep), mesh_dim_names=("pp", "ep"))
        self.ep, pp = mesh["ep"].get_group(), mesh["pp"].get_group()
        stages = [tw.pipeline.stages_of(args.schedule, rank, args.pp) for rank in range(args.pp)]
        self.mine, num_stages = stages[pp.rank()], 1 + max(map(max, stages))
        check(args, num_stages)
        sizes = ModelSizes(args.layers, args.hidden, 2 * args.hidden, args.experts // args.ep, 2, args.sequence)
        model = MoeLanguageModel(sizes, self.ep, dtype=torch.float32, device=device)
        self.parts = [part for index, part in enumerate(parts_of(model, num_stages)) if index in self.mine]
        self.pipeline = tw.pipeline.build(self.parts, args.schedule, group=pp, strategy=args.strategy)
        # a name for each weight that is the same under every schedule; experts differ from rank to rank of --ep
        expert = f"experts of rank {self.ep.rank()} of {args.ep}"
        self.weights = {
            name.replace("experts", expert): p for part in self.parts for name, p in part.named_parameters()
        }
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=args.lr)
        for p in self.weights.values():  # there before the first step, so that a checkpoint can be read into it
            self.optimizer.state[p] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        self.text = python_text()

    def step(self, number: int) -> float:
        """Train one step, and return its loss, over all ranks."""
        args = self.args
        # the text of a step follows from its number: a run that goes on sees what it would have seen
        seed = 1_000 * number + self.ep.rank()
        rows = Batches(self.text, args.microbatches * args.batch, args.sequence, seed, self.device).next()
        loss, _ = self.pipeline.step(
            rows[:, :-1],
            rows[:, 1:],
            num_microbatches=args.microbatches,
            loss_fn=next_byte_loss,
            loss_scale=1 / args.ep,
            keep_outputs=False,
        )
        if args.ep > 1:  # an expert has seen the text of all ranks; of everything else each has a copy
            for name, p in self.weights.items():
                if "experts" not in name:
                    dist.all_reduce(p.grad, group=self.ep)
            dist.all_reduce(loss, group=self.ep)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item() / args.ep

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything that a checkpoint holds: it can be read under another schedule and another --pp."""
        found = {f"model.{name}": p.detach() for name, p in self.weights.items()}
        for name, p in self.weights.items():
            found |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[p].items()}
        return found

    def save(self, number: int) -> None:
        dcp.save(self.state(), checkpoint_id=self.args.checkpoints / f"step-{number:06d}")

    def load(self) -> int:
        """Read the newest complete checkpoint, and return how many steps it has seen."""
        folder = self.args.checkpoints
        # the metadata are written last: a run that was killed while it saved leaves none
        complete = sorted(folder.glob("step-*/.metadata")) if folder else []
        newest = [complete[-1].parent.name if complete else ""]
        dist.broadcast_object_list(newest, src=0)
        if not newest[0]:
            return 0
        dcp.load(self.state(), checkpoint_id=folder / newest[0])
        return int(newest[0].removeprefix("step-"))


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be, and files that cannot be written, before anything starts."""
    for name in ("pp", "ep", "steps", "microbatches", "batch", "sequence", "layers", "save_every"):
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is at least 1", given=str(getattr(args, name)), remedy="leave it out")
    for option, value in (("--lr", args.lr), ("--link-gbps", args.link_gbps)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{option} is a number above 0", given=f"{value:g}", remedy="leave it out")
    if args.json:
        check_output(args.json)
    try:
        if args.checkpoints:
            args.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "--checkpoints is a folder that can be written",
            given=f"{args.checkpoints}: {error.strerror}",
            remedy="choose another one",
        ) from error


def check(args: argparse.Namespace, num_stages: int) -> None:
    """Refuse sizes that cannot be."""
    for option, given, holds, rule, remedy in (
        (
            "--layers",
            args.layers,
            args.layers >= num_stages,
            f"at least the number of stages, {num_stages}",
            num_stages,
        ),
        ("--hidden", args.hidden, args.hidden > 0 and args.hidden % 64 == 0, "a multiple of 64", 64),
        (
            "--experts",
            args.experts,
            args.experts > 0 and args.experts % args.ep == 0,
            "a multiple of --ep",
            2 * args.ep,
        ),
    ):
        if not holds:
            raise UsageError(f"{option} is {rule}", given=str(given), remedy=f"{option} {remedy}")


class Meter:
    """Tells how fast a step was, and how much of its communication was hidden."""

    def __init__(self, training: Training, link: SimulatedLink | None) -> None:
        args = training.args
        self._tokens = args.microbatches * args.batch * args.sequence * args.ep
        self._log = link.log if link is not None else None
        self._communicates = args.ep > 1 or args.link_gbps is not None
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._begin_ns = time.perf_counter_ns()
        if self._log is not None:
            self._log.clear()

    def read(self) -> dict[str, float | None]:
        """Return the numbers of the step that ends now."""
        spent_ns = time.perf_counter_ns() - self._begin_ns
        numbers: dict[str, float | None] = {"tokens_per_second": self._tokens / spent_ns * 1e9}
        if self._log is not None:
            # a receive begins long before its bytes are under way: only a stage's own collectives are counted
            moved = [t for t in self._log.transfers if t.operation not in POINT_TO_POINT and self._communicates]
            communication = union([(t.begin_ns, t.end_ns) for t in moved])
            waiting = union(list(self._log.waits))
            total = length(communication)
            hidden = length(difference(communication, waiting))
            numbers["hidden_share"] = hidden / total if total else None
            if dist.get_world_size() > 1:
                numbers["waiting_share"] = length(waiting) / spent_ns
        return numbers


@contextlib.contextmanager
def progress(total: int, done: int):
    """Show a progress bar on a terminal, and a line now and then elsewhere; on rank 0 alone."""
    if dist.get_rank():
        yield lambda *_: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress

        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("training", total=total, completed=done)
            yield lambda step, text: bar.update(task, completed=step, description=text)
    else:
        every = max(1, total // 20)
        yield lambda step, text: print(f"step {step}: {text}", flush=True) if step % every == 0 else None


def log_of(path: Path | None, done: int):
    """Return what appends a record to the log, from which a run that goes on takes back later steps."""
    if path is None or dist.get_rank():
        return lambda _: None
    lines = path.read_text().splitlines() if path.exists() and done else []
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= done]
    path.write_text("".join(line + "\n" for line in kept))

    def write(record):
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    return write


def train(args: argparse.Namespace, device: torch.device) -> None:
    training = Training(args, device)
    done = training.load()
    if done and dist.get_rank() == 0:
        print(f"going on after step {done}")
    # without a speed it delays nothing, and tells what was communicated when
    link = SimulatedLink(args.link_gbps) if args.link_gbps or device.type == "cpu" else None
    engine().channels.lone_groups_are_slow = bool(args.link_gbps)
    record: dict[str, object] = {}
    with link or contextlib.nullcontext(), progress(args.steps, done) as show:
        write, meter = log_of(args.json, done), Meter(training, link if device.type == "cpu" else None)
        for number in range(done + 1, args.steps + 1):
            loss = training.step(number)
            record = {"step": number, "loss": loss, **meter.read()}
            if args.checkpoints and (number % args.save_every == 0 or number == args.steps):
                training.save(number)
            if device.type == "cuda" and number == args.steps:
                # a GPU is asked by a profile, of one more step, whose weights nobody keeps
                record["hidden_share"] = profile_of(lambda: training.step(args.steps + 1)).hidden_share
            write(record)
            show(number, told(record))
            meter.begin()
    if record and dist.get_rank() == 0:
        print(f"{args.schedule}, {args.pp} x {args.ep} ranks, {device.type}: {told(record)}")


def told(record: dict[str, object]) -> str:
    text = f"loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s"
    for key, what in (
        ("hidden_share", "of the stages' communication hidden"),
        ("waiting_share", "of the time waiting"),
    ):
        if record.get(key) is not None:
            text += f", {record[key]:.0%} {what}"
    return text


def main() -> int:
    args = parse()
    try:
        check_numbers(args)
        device = join(args.pp * args.ep, args.limit_s)
        train(args, device)
    except UsageError as error:
        print(f"train_moe.py: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
