"""What every part has: this rank's device, the sizes, a report that is written row by row, and a time to stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measuring.steps import Equality

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.measure.hidden import profile_of
from torchweave.measure.language import LanguageModel, next_byte_loss
from torchweave.measure.link import SimulatedLink
from torchweave.measure.moe import CapacityMixture, ModelSizes, MoeLanguageModel
from torchweave.measure.parts import ModelPart, parts_of
from torchweave.measure.subject import deterministic
from torchweave.measure.text import Batches, python_text
from torchweave.measure.training import LIMIT


class Sizes(NamedTuple):
    """What is measured on GPUs, or tried out on CPUs."""

    layers: int = 4
    hidden: int = 4096
    tokens: int = 4096  # in a microbatch
    sequence: int = 1024
    top_k: int = 4
    counts: tuple[int, ...] = (8, 16)  # of microbatches
    rounds: int = 5
    link_ms: float = 0.84  # what an all-to-all of a stage takes over the simulated link
    dtype: torch.dtype = torch.bfloat16


SMALL = Sizes(4, 64, 128, 64, 2, (4,), 2, 2.0, torch.float32)


class Report:
    """Rows of one part, written after each of them: a run that is cut short keeps what it has."""

    def __init__(self, path: Path) -> None:
        self._path, self._found = path, {"rows": []}

    def add(self, row: Mapping[str, Any], told: str) -> None:
        """Add a row, on rank 0."""
        self._found["rows"].append(dict(row))
        self.note(told)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows so far; the same on every rank as far as the ranks have measured the same."""
        return self._found["rows"]

    def set(self, **facts: Any) -> None:
        """Add facts that are no row."""
        self._found |= facts
        self.note("")

    def note(self, told: str) -> None:
        if dist.get_rank() == 0:
            # whole or not at all: this process may be ended while it writes
            unfinished = self._path.with_suffix(".part")
            unfinished.write_text(json.dumps(self._found, indent=1))
            unfinished.replace(self._path)
            if told:
                print(told, flush=True)


class Setup(NamedTuple):
    """What a part is given."""

    device: torch.device
    sizes: Sizes
    report: Report
    out: Path  # for files that are kept
    work: Path  # for files that are not
    end: float  # of `time.monotonic()`

    def is_over(self) -> bool:
        """Return whether it is time to stop, the same on every rank."""
        said = [time.monotonic() > self.end]
        dist.broadcast_object_list(said, src=0)
        if said[0]:
            self.report.set(cut_short=True)
        return said[0]

    def model(self, group: dist.ProcessGroup) -> MoeLanguageModel:
        """Return the model of all parts but Megatron's, whose experts a group shares."""
        s = self.sizes
        sizes = ModelSizes(s.layers, s.hidden, int(s.hidden * 0.375), 4, s.top_k, s.sequence)
        return MoeLanguageModel(sizes, group, dtype=s.dtype, device=self.device)

    def rows(self, microbatches: int, seed: int) -> torch.Tensor:
        """Return a step's text."""
        s = self.sizes
        return Batches(python_text(), microbatches * s.tokens // s.sequence, s.sequence, seed, self.device).next()

    def link(self, simulated: bool) -> SimulatedLink:
        """Return a link under one-rank groups, whose all-to-alls it lets last as long as between ranks; or none."""
        s = self.sizes
        gbps = s.tokens * s.top_k * s.hidden * s.dtype.itemsize * 8 / s.link_ms / 1e6
        return SimulatedLink(gbps if simulated else None, only_lone_groups=True)

    def said(self) -> dict[str, Any]:
        """Return the sizes as a result file has them."""
        return {**self.sizes._asdict(), "dtype": str(self.sizes.dtype).removeprefix("torch.")}


def group_with(ctas: int | None, device: torch.device) -> dist.ProcessGroup:
    """Return a group of all ranks whose collectives hold at most so many SMs; None lets NCCL choose."""
    if device.type != "cuda" or ctas is None:
        return dist.new_group(timeout=LIMIT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LIMIT  # torch warns where this is not the timeout that it is given
    options.config.max_ctas = ctas
    return dist.new_group(timeout=LIMIT, backend="nccl", pg_options=options)


def alone() -> dist.ProcessGroup:
    """Return a group of this rank alone."""
    return dist.new_subgroups(1)[0]


def put_over(model: LanguageModel, group: dist.ProcessGroup) -> None:
    """Let the experts of a model be shared over another group of the same ranks."""
    for module in model.modules():
        if isinstance(module, CapacityMixture):
            module.group = group


def stages(model: LanguageModel, schedule: str, group: dist.ProcessGroup) -> list[ModelPart]:
    """Return this rank's stages of a model under a schedule; the weights stay the model's own."""
    counted = [tw.pipeline.stages_of(schedule, rank, group.size()) for rank in range(group.size())]
    parts = parts_of(model, 1 + max(map(max, counted)))
    return [parts[index] for index in counted[group.rank()]]


def step_of(pipeline: tw.pipeline.Pipeline, text: torch.Tensor, microbatches: int) -> Callable[[], torch.Tensor]:
    """Return a training step without the optimizer; it returns the loss."""

    def step() -> torch.Tensor:
        loss, _ = pipeline.step(
            text[:, :-1],
            text[:, 1:],
            num_microbatches=microbatches,
            loss_fn=next_byte_loss,
            keep_outputs=False,
        )
        return loss

    return step


def are_equal(
    ways: Mapping[str, Callable[[], torch.Tensor]], parameters: list[torch.nn.Parameter], device: torch.device
) -> dict[str, Any]:
    """Say whether all ways have the same losses and gradients, with deterministic kernels, to the bit."""
    equality = Equality()
    with deterministic(device):
        for _ in range(2):  # in the first, kinds of pairs are recorded
            for name, step in ways.items():
                clear(parameters)
                loss = step()
                equality.see(name, [loss, *(p.grad for p in parameters if p.grad is not None)])
    clear(parameters)
    return equality.said()


def clear(parameters: list[torch.nn.Parameter]) -> None:
    """Forget all gradients."""
    for parameter in parameters:
        parameter.grad = None


def peaks_mib(
    ways: Mapping[str, Callable[[], Any]], parameters: list[torch.nn.Parameter], device: torch.device
) -> dict[str, float] | None:
    """Return what a step of each way needs beyond the weights, MiB, gradients included; None on a CPU."""
    if device.type != "cuda":
        return None
    found = {}
    for name, step in ways.items():
        clear(parameters)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        found[name] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    clear(parameters)
    return found


def hidden_shares(
    ways: Mapping[str, Callable[[], Any]],
    device: torch.device,
    before: Callable[[], Any],
    counts: Callable[[str], bool] = lambda _: True,
) -> dict[str, dict[str, float | None]] | None:
    """Return hidden and idle share of this rank's device in a step of each way; None on a CPU."""
    if device.type != "cuda":
        return None
    found = {}
    for name, step in ways.items():
        before()
        found[name] = profile_of(step, dist.barrier, counts)._asdict()
    return found


def strategies() -> tuple[str, ...]:
    return ("serial", "turns", "streams")


def lone_groups_are_slow(slow: bool) -> None:
    """Say whether groups of one rank take turns, as they do over a simulated link."""
    engine().channels.lone_groups_are_slow = slow


def ways_of(
    pipelines: Mapping[str, tw.pipeline.Pipeline], text: torch.Tensor, microbatches: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return a step of each pipeline over the same text."""
    return {name: step_of(pipeline, text, microbatches) for name, pipeline in pipelines.items()}


def before_each(parameters: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Return what is done before each step: gradients are forgotten."""
    return partial(clear, parameters)
