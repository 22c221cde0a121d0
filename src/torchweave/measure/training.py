"""IDEA: the demo on one rank: train with woven pairs, compare with serial bit by bit, measure the four timings."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from torchweave import __version__
from torchweave.engine.pair import engine, weave
from torchweave.errors import UsageError
from torchweave.measure.link import SimulatedLink
from torchweave.measure.moe import ModelSizes, MoeLanguageModel
from torchweave.measure.pair_times import Pair, PairBench
from torchweave.measure.text import Batches, python_text

NUM_MICROBATCHES = 4
LIMIT = timedelta(seconds=120)
RunPair: TypeAlias = Callable[..., torch.Tensor]
# Told what is being done, how much of it is done, and how much there is.
Progress: TypeAlias = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo is asked for; None takes the default of the device.

    Args:
        layers: Layers of the model.
        hidden: Width of a token, a multiple of 64.
        tokens: Tokens in a microbatch.
        link_gbps: Speed of the simulated link, gigabits a second; 0 for none.
        link_sms: SMs that it holds on a GPU.
        steps: Training steps before measuring.
        rounds: Rounds of the four timings.
    """

    layers: int | None = None
    hidden: int | None = None
    tokens: int | None = None
    link_gbps: float | None = None
    link_sms: int = 1
    steps: int = 5
    rounds: int = 11


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What fits a device: a pair of some 300 ms on one CPU core, of some 30 ms on a data-centre GPU."""

    layers: int
    hidden: int
    tokens: int
    ffn_of_hidden: float
    experts_per_rank: int
    top_k: int
    gbps: float
    dtype: torch.dtype


# gloo itself takes about 1 ms of a core for every exchange, which nothing can hide: few and long ones on a CPU
_CPU = _Defaults(2, 1024, 512, 2.0, 2, 1, 0.4, torch.float32)
_CUDA = _Defaults(4, 4096, 4096, 0.375, 4, 4, 1280.0, torch.bfloat16)


class Demo:
    """One rank of the demo, within a process group that is up.

    Args:
        options: What is asked for.
        device: Where this rank computes.
    """

    def __init__(self, options: DemoOptions, device: torch.device) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.group, self.device, self.options = world, device, options
        defaults = _CUDA if device.type == "cuda" else _CPU
        hidden, tokens = options.hidden or defaults.hidden, options.tokens or defaults.tokens
        sequence = min(tokens, 1024 if device.type == "cuda" else 128)
        if tokens % sequence:
            raise UsageError(
                f"--tokens is a multiple of the sequence, {sequence}", given=str(tokens), remedy=str(sequence)
            )
        self.sizes = ModelSizes(
            layers=options.layers or defaults.layers,
            hidden=hidden,
            ffn=int(hidden * defaults.ffn_of_hidden),
            experts_per_rank=defaults.experts_per_rank,
            top_k=defaults.top_k,
            sequence=sequence,
        )
        self.model = MoeLanguageModel(self.sizes, self.group, dtype=defaults.dtype, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = Batches(python_text(), tokens // sequence, sequence, 1 + dist.get_rank(), device)
        alone = dist.get_world_size() == 1
        simulated = device.type == "cpu" or alone if options.link_gbps is None else options.link_gbps > 0
        self.link = SimulatedLink((options.link_gbps or defaults.gbps) if simulated else None, sms=options.link_sms)
        # a group of one has nothing to hide, unless its link is simulated
        engine().channels.lone_groups_are_slow = simulated

    def run(self, progress: Progress) -> dict[str, Any]:
        """Train, compare, measure.

        Args:
            progress: Told how far it is.

        Returns:
            The result, ready for JSON; the same on every rank but for the loss, which is this rank's.
        """
        losses: list[float] = []
        with self.link:
            for step in range(self.options.steps):
                losses.append(self.train_step())
                progress(f"training, loss {losses[-1]:.3f}", step + 1, self.options.steps)
            progress("comparing with serial", 0, 1)
            bit_equal = self.is_bit_equal()
            progress("measuring", 0, 1)
            with engine().observe() as log:
                times = PairBench(
                    self.make_pair, weave, self.link, self.group, self.device, segments=lambda: _taken(log)
                ).run(self.options.rounds)
            strategy = self.strategy()
            progress("measuring", 1, 1)
            link = str(self.link)
        return {
            **asdict(times),
            "bit_equal": bit_equal,
            "strategy": strategy,
            "link": link,
            "versions": versions(self.device),
            "ranks": dist.get_world_size(),
            "device": _name(self.device),
            "options": {**asdict(self.options), **asdict(self.sizes), "link_gbps": self.link.gbps},
            "losses": losses,
        }

    def make_pair(self) -> Pair:
        """Return the forward of one microbatch and the backward of another, whose graph is built here."""
        self.model.zero_grad(set_to_none=True)
        first, second = self.batches.next(), self.batches.next()
        loss = self.model.loss(first)
        return (lambda: self.model.loss(second)), (lambda: loss.backward())

    def train_step(self) -> float:
        """Train one step with woven pairs and return its mean loss."""
        losses = self._accumulate([self.batches.next() for _ in range(NUM_MICROBATCHES)], weave)
        with self.link.pause():
            self._average_shared_gradients()
        self.optimizer.step()
        return float(losses.mean())

    def is_bit_equal(self) -> bool:
        """Return whether a woven step has exactly the losses and gradients of a serial one, on every rank."""
        batches = [self.batches.next() for _ in range(NUM_MICROBATCHES)]
        with _deterministic(self.device):
            runs: list[list[torch.Tensor | None]] = []
            for run_pair in (_serially, weave):
                losses = self._accumulate(batches, run_pair)
                runs.append([losses, *(parameter.grad for parameter in self.model.parameters())])
                self.model.zero_grad(set_to_none=True)
        equal = all(_same(one, other) for one, other in zip(*runs, strict=True))
        verdicts: list[Any] = [None] * dist.get_world_size()
        with self.link.pause():
            dist.all_gather_object(verdicts, equal)
        return all(verdicts)

    def strategy(self) -> str:
        """Return which strategy ran the pairs."""
        with self.link.pause():
            forward, backward = self.make_pair()
        decision = engine().decision(forward, backward)
        return decision.trial.choice if decision else "serial"

    def _accumulate(self, batches: list[torch.Tensor], run_pair: RunPair) -> torch.Tensor:
        """Run F0; B0 | F1; B1 | F2; ...; the last B, and return the losses, shape (microbatches)."""
        self.model.zero_grad(set_to_none=True)
        losses = [self.model.loss(batches[0])]
        for batch in batches[1:]:
            losses.append(run_pair(forward=_forward(self.model, batch), backward=_backward(losses[-1], len(batches))))
        _backward(losses[-1], len(batches))()
        return torch.stack([loss.detach() for loss in losses])

    def _average_shared_gradients(self) -> None:
        """Average what every rank has a copy of; an expert's gradient holds all ranks' tokens already."""
        ranks = dist.get_world_size()
        if ranks == 1:
            return
        grads = [parameter.grad for parameter in self.model.shared_parameters() if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad) / ranks)


def run_demo(options: DemoOptions, progress: Progress) -> dict[str, Any] | None:
    """Run this process's rank of the demo, as torchrun's environment names it.

    Args:
        options: What is asked for.
        progress: Told how far it is; on rank 0 alone.

    Returns:
        The result on rank 0, None on the others.
    """
    device = _join()
    try:
        silent: Progress = lambda *_: None  # noqa: E731
        result = Demo(options, device).run(progress if dist.get_rank() == 0 else silent)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def num_gpus() -> int:
    """Return how many CUDA devices this machine has."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"torchweave": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found


def _join() -> torch.device:
    """Enter the process group that the environment names, with a GPU a rank where there are enough."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if num_gpus() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 0:
        # has to be there before cuBLAS is: without it no product is deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=LIMIT, device_id=device)
        return device
    torch.set_num_threads(1)  # the ranks share the cores
    # computation alone reads buffers that nobody filled: as floats they are often denormal, and several times slower
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", timeout=LIMIT)
    return torch.device("cpu")


def _forward(model: MoeLanguageModel, batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: model.loss(batch)


def _backward(loss: torch.Tensor, num_microbatches: int) -> Callable[[], None]:
    return lambda: (loss / num_microbatches).backward()


def _serially(*, forward: Callable[[], torch.Tensor], backward: Callable[[], None]) -> torch.Tensor:
    backward()
    return forward()


def _taken(log: Any) -> list[tuple[int, int]]:
    """Return what the last pair computed, and forget it."""
    segments: list[tuple[int, int]] = log.computing()
    log.spans.clear()
    return segments


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Ask for deterministic kernels on a GPU; the CPU's are, with one thread."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # not `warn_only`: under that cuDNN's attention keeps its nondeterministic backward
    torch.use_deterministic_algorithms(device.type == "cuda" or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
