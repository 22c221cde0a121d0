"""IDEA: what is measured: a small model on one rank, its link, and pairs of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from torchweave.engine.pair import OVERRIDE, engine
from torchweave.errors import UsageError
from torchweave.measure.dense import DenseLanguageModel, DenseSizes
from torchweave.measure.dropless import DroplessMixture
from torchweave.measure.language import LanguageModel
from torchweave.measure.link import SimulatedLink
from torchweave.measure.moe import ModelSizes, MoeLanguageModel
from torchweave.measure.pair_times import Pair, serially
from torchweave.measure.text import Batches, python_text

NUM_MICROBATCHES = 4
RunPair: TypeAlias = Callable[..., torch.Tensor]

# so many pairs are enough for `auto` to choose, whatever it has to try
MOST_TRIED = 40


@dataclass(frozen=True, slots=True)
class SubjectOptions:
    """What is asked for; None takes the default of the device.

    Args:
        chunk: One of `torchweave.measure.sizes.CHUNKS`.
        layers: Layers of the model.
        hidden: Width of a token, a multiple of 64.
        tokens: Tokens in a microbatch.
        top_k: To how many experts a token goes.
        link_gbps: Speed of the simulated link, gigabits a second; 0 for none.
        link_ms: Instead of a speed: how long an exchange between two layers takes on it, ms.
        link_sms: SMs that it holds on a GPU.
    """

    chunk: str = "moe"
    layers: int | None = None
    hidden: int | None = None
    tokens: int | None = None
    top_k: int | None = None
    link_gbps: float | None = None
    link_ms: float | None = None
    link_sms: int = 1


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What fits a device: a pair of some 300 ms on one CPU core, of some 30 ms on a data-centre GPU."""

    layers: int
    hidden: int
    tokens: int
    sequence: int
    expert_of_hidden: float
    ffn_of_hidden: float
    experts_per_rank: int
    top_k: int
    gbps: float
    dtype: torch.dtype


# gloo itself takes about 1 ms of a core for every exchange, which nothing can hide: few and long ones on a CPU
_CPU = _Defaults(2, 1024, 512, 128, 2.0, 2.75, 2, 1, 0.4, torch.float32)
_CUDA = _Defaults(4, 4096, 4096, 1024, 0.375, 2.75, 4, 4, 1280.0, torch.bfloat16)


class Subject:
    """One rank's model, within a process group that is up.

    Args:
        options: What is asked for.
        device: Where this rank computes.
        seed: Of weights and text.
        group: The ranks that share the model, all of the job's; None takes the default group.

    Attributes:
        sizes: The sizes that were taken, by name.
        link: The link under torch.distributed, to be entered.
        exchange_bytes: What an exchange between two layers sends.
    """

    def __init__(
        self, options: SubjectOptions, device: torch.device, seed: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        world = group or dist.group.WORLD
        assert world is not None
        self.group, self.device = world, device
        defaults = _CUDA if device.type == "cuda" else _CPU
        self._dtype = defaults.dtype
        hidden, tokens = options.hidden or defaults.hidden, options.tokens or defaults.tokens
        sequence = min(tokens, defaults.sequence)
        if tokens % sequence:
            raise UsageError(
                f"--tokens is a multiple of the sequence, {sequence}", given=str(tokens), remedy=str(sequence)
            )
        layers, top_k = options.layers or defaults.layers, options.top_k or defaults.top_k
        self.sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "sequence": sequence, "tokens": tokens}
        self.model: LanguageModel
        if options.chunk in ("moe", "dropless"):
            ffn = int(hidden * defaults.expert_of_hidden)
            sizes = ModelSizes(layers, hidden, ffn, defaults.experts_per_rank, top_k, sequence)
            mixture = DroplessMixture if options.chunk == "dropless" else None
            self.model = MoeLanguageModel(sizes, world, dtype=defaults.dtype, device=device, seed=seed, mixture=mixture)
            self.sizes |= {"ffn": ffn, "experts_per_rank": sizes.experts_per_rank, "top_k": top_k}
        else:
            dense = DenseSizes(layers, hidden, int(hidden * defaults.ffn_of_hidden), sequence)
            shared = None if options.chunk == "alone" else world
            self.model = DenseLanguageModel(dense, shared, dtype=defaults.dtype, device=device, seed=seed)
            self.sizes |= {"ffn": dense.ffn}
            top_k = 1
        self.batches = Batches(python_text(), tokens // sequence, sequence, 1 + dist.get_rank() + seed, device)
        num_bytes = tokens * min(top_k, self.sizes.get("experts_per_rank", 1) * dist.get_world_size()) * hidden
        gbps = options.link_gbps
        if options.link_ms is not None:
            gbps = num_bytes * self._dtype.itemsize * 8 / options.link_ms / 1e6
        self.exchange_bytes = num_bytes * self._dtype.itemsize
        alone = dist.get_world_size() == 1
        simulated = device.type == "cpu" or alone if gbps is None else gbps > 0
        self.link = SimulatedLink((gbps or defaults.gbps) if simulated else None, sms=options.link_sms)
        # a group of one has nothing to hide, unless its link is simulated
        engine().channels.lone_groups_are_slow = simulated

    def make_pair(self) -> Pair:
        """Return the forward of one microbatch and the backward of another, whose graph is built here."""
        self.model.zero_grad(set_to_none=True)
        first, second = self.batches.next(), self.batches.next()
        return _forward(self.model, second), _backward(self.model.loss(first), 1)

    def accumulate(self, batches: Sequence[torch.Tensor], run_pair: RunPair) -> torch.Tensor:
        """Run F0; B0 | F1; B1 | F2; ...; the last B.

        Args:
            batches: The microbatches.
            run_pair: Called with `forward=` and `backward=`.

        Returns:
            The losses, shape (microbatches).
        """
        self.model.zero_grad(set_to_none=True)
        losses = [self.model.loss(batches[0])]
        for batch in batches[1:]:
            losses.append(run_pair(forward=_forward(self.model, batch), backward=_backward(losses[-1], len(batches))))
        _backward(losses[-1], len(batches))()
        return torch.stack([loss.detach() for loss in losses])

    def is_bit_equal(self, weave: RunPair, num_microbatches: int = NUM_MICROBATCHES) -> bool:
        """Return whether woven pairs have exactly the losses and gradients of serial ones, on every rank."""
        batches = [self.batches.next() for _ in range(num_microbatches)]
        with deterministic(self.device):
            runs: list[list[torch.Tensor | None]] = []
            for run_pair in (serially, weave):
                losses = self.accumulate(batches, run_pair)
                runs.append([losses, *(parameter.grad for parameter in self.model.parameters())])
                self.model.zero_grad(set_to_none=True)
        equal = all(_same(one, other) for one, other in zip(*runs, strict=True))
        verdicts: list[Any] = [None] * dist.get_world_size()
        with self.link.pause():
            dist.all_gather_object(verdicts, equal, group=self.group)
        return all(verdicts)

    def settle(self, weave: RunPair, num_before: int = 0) -> str:
        """Run pairs until `auto` has chosen a strategy for them, and return which runs them.

        Args:
            weave: Runs a pair, by the `strategy=` that it is given.
            num_before: So many pairs run by each strategy before that: an allocator that has grown gives other times.
        """
        for number in range(MOST_TRIED):
            forward, backward = self._prepare()
            decision = engine().decision(forward, backward)
            if decision is not None and decision.trial.is_settled:
                break
            weave(forward=forward, backward=backward)
            del forward, backward
            if number == 0:
                self._run_before(weave, num_before)
        return self.strategy()

    def _run_before(self, weave: RunPair, num_before: int) -> None:
        decision = engine().decision(*self._prepare())
        for strategy in decision.trial.candidates * num_before if decision is not None else ():
            forward, backward = self._prepare()
            weave(forward=forward, backward=backward, strategy=strategy)
            del forward, backward

    def strategy(self) -> str:
        """Return which strategy `auto` runs pairs by now."""
        setting = os.environ.get(OVERRIDE, "auto")
        if setting not in ("", "auto"):
            return setting
        decision = engine().decision(*self._prepare())
        return decision.trial.choice if decision else "serial"

    def _prepare(self) -> Pair:
        with self.link.pause():
            return self.make_pair()


def _forward(model: LanguageModel, batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: model.loss(batch)


def _backward(loss: torch.Tensor, num_microbatches: int) -> Callable[[], None]:
    return lambda: (loss / num_microbatches).backward()


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
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
