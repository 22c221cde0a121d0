"""IDEA: the demo on one rank: train with woven pairs, compare with serial bit by bit, measure the four timings."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from torchweave import __version__
from torchweave.engine.pair import engine, weave
from torchweave.measure.pair_times import PairBench
from torchweave.measure.subject import NUM_MICROBATCHES, Subject, SubjectOptions

LIMIT = timedelta(seconds=120)
# Told what is being done, how much of it is done, and how much there is.
Progress: TypeAlias = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo is asked for.

    Args:
        subject: The model and its link.
        steps: Training steps before measuring.
        rounds: Rounds of the four timings.
    """

    subject: SubjectOptions = field(default_factory=SubjectOptions)
    steps: int = 5
    rounds: int = 11


class Demo:
    """One rank of the demo, within a process group that is up.

    Args:
        options: What is asked for.
        device: Where this rank computes.
    """

    def __init__(self, options: DemoOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.subject = Subject(options.subject, device)
        self.optimizer = torch.optim.AdamW(self.subject.model.parameters(), lr=1e-3)

    def run(self, progress: Progress) -> dict[str, Any]:
        """Train, compare, measure.

        Args:
            progress: Told how far it is.

        Returns:
            The result, ready for JSON; the same on every rank but for the loss, which is this rank's.
        """
        subject, losses = self.subject, []
        with subject.link:
            for step in range(self.options.steps):
                losses.append(self.train_step())
                progress(f"training, loss {losses[-1]:.3f}", step + 1, self.options.steps)
            progress("comparing with serial", 0, 1)
            bit_equal = subject.is_bit_equal(weave)
            progress("choosing a strategy", 0, 1)
            subject.settle(weave)
            progress("measuring", 0, 1)
            with engine().observe() as log:
                bench = PairBench(
                    subject.make_pair,
                    {"woven": weave},
                    subject.link,
                    subject.group,
                    self.device,
                    segments=lambda: taken(log),
                )
                times = bench.run(self.options.rounds)["woven"]
            strategy = subject.strategy()
            progress("measuring", 1, 1)
            link = str(subject.link)
        return {
            **asdict(times),
            "bit_equal": bit_equal,
            "strategy": strategy,
            "link": link,
            "versions": versions(self.device),
            "ranks": dist.get_world_size(),
            "device": name_of(self.device),
            "options": {
                **asdict(self.options.subject),
                "steps": self.options.steps,
                "rounds": self.options.rounds,
                **subject.sizes,
                "link_gbps": subject.link.gbps,
            },
            "losses": losses,
        }

    def train_step(self) -> float:
        """Train one step with woven pairs and return its mean loss."""
        batches = [self.subject.batches.next() for _ in range(NUM_MICROBATCHES)]
        losses = self.subject.accumulate(batches, weave)
        with self.subject.link.pause():
            self._average_shared_gradients()
        self.optimizer.step()
        return float(losses.mean())

    def _average_shared_gradients(self) -> None:
        """Average what every rank has a copy of; an expert's gradient holds all ranks' tokens already."""
        ranks = dist.get_world_size()
        if ranks == 1:
            return
        shared = self.subject.model.shared_parameters()
        grads = [parameter.grad for parameter in shared if parameter.grad is not None]
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
    return on_this_rank(lambda device, told: Demo(options, device).run(told), progress)


def on_this_rank(run: Callable[[torch.device, Progress], dict[str, Any]], progress: Progress) -> dict[str, Any] | None:
    """Run this process's rank of a measurement, as torchrun's environment names it.

    Args:
        run: From this rank's device, and what is told how far it is, to the result.
        progress: Told how far it is; on rank 0 alone.

    Returns:
        The result on rank 0, None on the others.
    """
    device = join()
    try:
        is_first = dist.get_rank() == 0
        result = run(device, progress if is_first else lambda *_: None)
        return result if is_first else None
    finally:
        engine().close()
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


def join(limit: timedelta = LIMIT) -> torch.device:
    """Enter the process group that the environment names, with a GPU a rank where there are enough.

    Args:
        limit: The group's timeout.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    store, rank, size = next(rendezvous("env://", timeout=limit))
    # torchrun keeps its store over a restart, with what the ranks that are gone have said in it
    store = PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if num_gpus() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 0:
        # has to be there before cuBLAS is: without it no product is deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
        return device
    torch.set_num_threads(1)  # the ranks share the cores
    # computation alone reads buffers that nobody filled: as floats they are often denormal, and several times slower
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return torch.device("cpu")


def taken(log: Any) -> list[tuple[int, int]]:
    """Return what the last pair computed, and forget it."""
    segments: list[tuple[int, int]] = log.computing()
    log.spans.clear()
    return segments


def name_of(device: torch.device) -> str:
    """Return what a device is called in a report."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
