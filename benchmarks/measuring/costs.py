"""What the actions of a pipeline cost alone: from it the simulator says what a step takes, before it is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from measuring.steps import gathered, wait
from torchweave.engine.pair import weave
from torchweave.measure.link import SimulatedLink
from torchweave.measure.stopwatch import Stopwatch
from torchweave.pipeline.backward import full_backward, input_backward
from torchweave.schedule.costs import Costs

NAMES = ("F", "B", "W", "I", "comm", "comm_backward")


class StageInputs(NamedTuple):
    """A stage as it runs alone.

    Attributes:
        module: The stage.
        enters: Returns what comes in for one microbatch, a leaf with gradient unless it is the first stage.
        loss_fn: On the last stage, the loss of its output; None on the others.
        has_gradient: Whether what comes in gets a gradient.
    """

    module: torch.nn.Module
    enters: Callable[[], torch.Tensor]
    loss_fn: Callable[[torch.Tensor], torch.Tensor] | None
    has_gradient: bool


class Alone:
    """Runs single actions of a stage."""

    def __init__(self, stage: StageInputs) -> None:
        self.stage = stage

    def forward(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = self.stage.enters()
        y = self.stage.module(x)
        if self.stage.loss_fn is not None:
            y = self.stage.loss_fn(y)
        return y, ([x] if self.stage.has_gradient else [])

    def prepare(self, kind: str) -> Callable[[], object]:
        """Return one action, with all that comes before it done."""
        if kind == "F":
            return self.forward
        y, leaves = self.forward()
        edges, roots = [get_gradient_edge(y)], [torch.ones_like(y)]
        del y
        if kind == "B":
            return lambda: full_backward(edges, roots, leaves)
        if kind == "I":
            return lambda: input_backward(edges, roots, leaves)
        return input_backward(edges, roots, leaves)[1].run


class Costing:
    """Measures stages on all ranks at once, as they compute at once in a step.

    Args:
        link: The link under their communication, entered.
        device: Where they compute.
        rounds: How often each action is timed.
    """

    def __init__(self, link: SimulatedLink, device: torch.device, rounds: int) -> None:
        self._link, self._device, self._rounds = link, device, rounds
        self._watch = Stopwatch(device, dist.group.WORLD)

    def costs(self, mine: Mapping[int, StageInputs], num_stages: int, transfer: torch.Tensor) -> Costs:
        """Return what the actions of each stage cost, ms.

        Args:
            mine: This rank's stages by their numbers; every rank has as many.
            num_stages: Of the whole model.
            transfer: What a stage sends to the next one.
        """
        own = {index: self._of_stage(stage) for index, stage in mine.items()}
        shares = [self._recovered(stage, own[index]) for index, stage in mine.items()]
        every = gathered((own, shares))
        table = {index: cost for theirs, _ in every for index, cost in theirs.items()}
        columns = {name: tuple(table[index][name] for index in range(num_stages)) for name in NAMES}
        share = statistics.median([share for _, found in every for share in found])
        return Costs(**columns, p2p=self.transfer_ms(transfer), recovered=min(1.0, max(0.0, share)))

    def transfer_ms(self, tensor: torch.Tensor) -> float:
        """Return how long a tensor takes from rank to rank, from half of a round trip between the first two."""
        rank, times = dist.get_rank(), []
        if dist.get_world_size() < 2:
            return 0.0
        for number in range(self._rounds + 1):
            dist.barrier()
            wait(self._device)
            begin = time.perf_counter()
            for sends in ((rank == 0), (rank == 1)):
                if rank < 2:
                    operation = dist.P2POp(dist.isend if sends else dist.irecv, tensor, 1 - rank)
                    for work in dist.batch_isend_irecv([operation]):
                        work.wait()
            wait(self._device)
            if number:
                times.append((time.perf_counter() - begin) * 1e3 / 2)
        return gathered(statistics.median(times))[0]

    def _of_stage(self, stage: StageInputs) -> dict[str, float]:
        """Return computation and communication of F, B, I and W."""
        run = Alone(stage)
        whole = {kind: self._median_ms(run, kind) for kind in ("F", "B")}
        with self._link.mute():
            alone = {kind: self._median_ms(run, kind) for kind in ("F", "B", "I", "W")}
        return {
            **alone,
            "comm": max(0.0, whole["F"] - alone["F"]),
            # a first stage has no inputs with gradients: its I is nothing, and all of its backward waits for W
            "comm_backward": max(0.0, whole["B"] - alone["B"]),
        }

    def _median_ms(self, run: Alone, kind: str) -> float:
        times = [self._watch.time_ms(run.prepare(kind)) for _ in range(self._rounds + 1)]
        return statistics.median(times[1:])

    def _recovered(self, stage: StageInputs, cost: Mapping[str, float]) -> float:
        """Return what weaving the forward and the backward of a stage recovers, from pairs in turn."""
        run = Alone(stage)
        times: dict[str, list[float]] = {"serial": [], "turns": []}
        for number in range(self._rounds + 2):
            for strategy, found in times.items():
                backward = run.prepare("B")
                spent_ms = self._watch.time_ms(self._pair(run, backward, strategy))
                if number >= 2:
                    found.append(spent_ms)
        serial, woven = (statistics.median(found) for found in times.values())
        bound = max(cost["F"] + cost["B"], cost["comm"] + cost["comm_backward"])
        return (serial - woven) / (serial - bound) if serial > bound else 0.0

    @staticmethod
    def _pair(run: Alone, backward: Callable[[], object], strategy: str) -> Callable[[], Any]:
        return lambda: weave(run.forward, backward, strategy=strategy, kind=("alone", id(run.stage.module)))


def said(costs: Costs) -> dict[str, Any]:
    """Return costs as a result file has them."""
    return {name: getattr(costs, name) for name in (*NAMES, "p2p", "recovered")}
