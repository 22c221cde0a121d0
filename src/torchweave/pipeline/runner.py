"""IDEA: a rank walks through its row of the plan; everything else follows from the actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from torchweave.engine.pair import weave
from torchweave.errors import TorchweaveError
from torchweave.pipeline.asked import Asked
from torchweave.pipeline.batch import Microbatches
from torchweave.pipeline.book import Entry, Key, Strides
from torchweave.pipeline.faults import Where
from torchweave.pipeline.p2p import Receipt
from torchweave.pipeline.rig import Rig
from torchweave.pipeline.stage import Forward
from torchweave.pipeline.values import Layout, Outputs, laid_out, put_together, stride_of
from torchweave.schedule.action import Action
from torchweave.schedule.plan import Plan

T = TypeVar("T")


@dataclass
class Step:
    """One run of this rank's row.

    Args:
        rig: What the pipeline has on this rank.
        plan: With transfers and reductions.
        inputs: Of the first stage.
        targets: Of the last stage.
        asked: What the run is asked for.
    """

    rig: Rig
    plan: Plan
    inputs: Microbatches
    targets: Microbatches
    asked: Asked
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    _outgoing: dict[Key, tuple[list[Tensor], Entry]] = field(default_factory=dict)
    _incoming: dict[Key, tuple[Any, Receipt]] = field(default_factory=dict)
    _local: dict[Key, Any] = field(default_factory=dict)
    _entered: dict[tuple[int, int], Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seed = self.asked.seed(self.plan.num_microbatches)
        self._row = self.plan.ranks[self.rig.rank]
        leaves = [leaf for action in self._row for leaf in action.leaves() if leaf.kind in ("B", "W")]
        self._last = {leaf.stage: leaf for leaf in leaves}
        self._do: dict[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weights,
            "OVERLAP_F_B": self._pair,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._receive_outputs,
            "RECV_B": self._receive_gradients,
            "REDUCE_GRAD": lambda action: self.rig.sums.complete(action.stage),
        }

    def run(self) -> None:
        """Run the row.

        Raises:
            PipelineError: This rank or another one failed.
        """
        here = self.rig.ranks[self.rig.rank]
        for action in self._row:
            with self.rig.guard.at(Where.of(here, action)), record_function(f"PP:{action}"):
                if action.kind in self._do:  # UNSHARD and RESHARD are FSDP's own affair here
                    self._do[action.kind](action)
        with self.rig.guard.at(Where(here, None, "the end of the step", None)):
            if self.asked.trains:
                self.rig.sums.finish(self.rig.guard)
            self.rig.wire.finish()

    def _forward(self, action: Action) -> None:
        forward = self._prepare_forward(action)
        self._finish_forward(action, forward, *forward.run())

    def _backward(self, action: Action) -> None:
        self._finish_backward(action, self._prepare_backward(action)())

    def _weights(self, action: Action) -> None:
        assert action.microbatch is not None
        self.rig.stages[action.stage].weights(action.microbatch, last=self._is_last(action))

    def _pair(self, action: Action) -> None:
        forward_action, backward_action = action.parts
        prepared = self._prepare_forward(forward_action)
        gradients: list[Sequence[Tensor | None]] = []
        failed: list[Action] = []
        forward = partial(_recorded, forward_action, prepared.run, failed)
        backward = partial(_into, gradients, backward_action, self._prepare_backward(backward_action), failed)
        try:
            output, loss = self._run_pair(forward_action, backward_action, forward, backward)
        except BaseException:
            # it was one of the two
            with self.rig.guard.at(Where.of(self.rig.ranks[self.rig.rank], failed[0] if failed else action)):
                raise
        here = self.rig.ranks[self.rig.rank]
        with self.rig.guard.at(Where.of(here, backward_action)):
            self._finish_backward(backward_action, gradients[0])
        with self.rig.guard.at(Where.of(here, forward_action)):
            self._finish_forward(forward_action, prepared, output, loss)

    def _run_pair(
        self,
        forward_action: Action,
        backward_action: Action,
        forward: Callable[[], tuple[Any, Tensor | None]],
        backward: Callable[[], None],
    ) -> tuple[Any, Tensor | None]:
        if self._is_last(backward_action) and self.rig.stages[backward_action.stage].wrapping.reduces_in_backward:
            backward()  # a wrapper's own communication must not meet the other strand
            return forward()
        kind = (self.rig.name, forward_action.stage, backward_action.stage, backward_action.kind)
        return weave(forward, backward, strategy=self.rig.strategy, kind=kind)

    def _prepare_forward(self, action: Action) -> Forward:
        """Wait for what comes in, and return the forward."""
        stage, microbatch = self.rig.stages[action.stage], _microbatch(action)
        before = Key("F", action.stage - 1, microbatch)
        value = self.inputs[microbatch] if stage.is_first else self._arrived(before)
        target = self.targets.get(microbatch) if stage.is_last else None
        return stage.forward(value, self.asked.loss_fn if stage.is_last else None, target)

    def _finish_forward(self, action: Action, forward: Forward, output: Any, loss: Tensor | None) -> None:
        """Keep what the backward needs, and hand the outputs over."""
        stage, microbatch = self.rig.stages[action.stage], _microbatch(action)
        outputs = None if stage.is_last else stage.outputs_of(output)
        if self.asked.trains:
            stage.keep(microbatch, forward, outputs, loss)
        if loss is not None:
            self._keep_loss(microbatch, loss.detach())
        if outputs is not None:
            self._hand_over(Key("F", action.stage, microbatch), outputs)
        elif self.asked.keeps_outputs:
            self.outputs[microbatch] = torch.utils._pytree.tree_map(_detached, output)

    def _keep_loss(self, microbatch: int, loss: Tensor) -> None:
        self.losses[microbatch] = loss
        # a GPU's is looked at when the step ends
        if self.rig.stops_at_nan and self.asked.trains and loss.device.type == "cpu":
            check_finite(loss)

    def _hand_over(self, key: Key, outputs: Outputs) -> None:
        if self._is_here(key.stage + 1, key.microbatch):
            self._local[key] = _with_gradients(outputs.layout, [tensor.detach() for tensor in outputs.tensors])
            return
        layout = self.rig.book.settled(key, outputs.layout)
        assert isinstance(layout, Layout)
        strides = [described.stride for described in layout.tensors]
        tensors = [laid_out(tensor, stride) for tensor, stride in zip(outputs.tensors, strides, strict=True)]
        self._outgoing[key] = (tensors, layout)

    def _prepare_backward(self, action: Action) -> Callable[[], Sequence[Tensor | None]]:
        """Wait for the gradients that come in, and return the backward."""
        stage, microbatch = self.rig.stages[action.stage], _microbatch(action)
        gradients: list[Tensor | None]
        if stage.is_last:
            loss = self.losses[microbatch]
            gradients = [torch.full_like(loss, self._seed)] if stage.has_graph(microbatch) else []
        else:
            gradients = self._arrived(Key("B", action.stage + 1, microbatch))
        return stage.backward(microbatch, gradients, kind=action.kind, last=self._is_last(action))

    def _finish_backward(self, action: Action, gradients: Sequence[Tensor | None]) -> None:
        """Hand the gradients of the inputs back."""
        if action.stage == 0:
            return
        key = Key("B", action.stage, _microbatch(action))
        if self._is_here(action.stage - 1, key.microbatch):
            self._local[key] = list(gradients)
            return
        strides = self.rig.book.settled(key, [None if g is None else stride_of(g) for g in gradients])
        assert isinstance(strides, list)
        self._outgoing[key] = (self._filled(key, gradients, strides), strides)

    def _filled(self, key: Key, gradients: Sequence[Tensor | None], strides: Strides) -> list[Tensor]:
        layouts = [layout for layout in self._entered.pop((key.stage, key.microbatch)).tensors if layout.requires_grad]
        return [
            layout._replace(stride=stride).empty(self.rig.device).zero_()
            if gradient is None
            else laid_out(gradient, stride)
            for layout, gradient, stride in zip(layouts, gradients, strides, strict=True)
            if stride is not None
        ]

    def _send(self, action: Action) -> None:
        microbatch = _microbatch(action)
        key = Key(action.kind[-1], action.stage, microbatch)
        target = action.stage + (1 if key.kind == "F" else -1)
        peer = self.plan.rank_of(target, microbatch)
        awaited = Where(self.rig.ranks[peer], target, f"{target}{key.kind}{microbatch}", microbatch)
        tensors, looks = self._outgoing.pop(key)
        self.rig.book.tell(key, looks, peer, awaited)
        self.rig.wire.send(peer, tensors, awaited)

    def _receive_outputs(self, action: Action) -> None:
        microbatch = _microbatch(action)
        key = Key("F", action.stage - 1, microbatch)
        peer, awaited = self._made_by(key)
        layout = self.rig.book.layout(key, peer, awaited)
        self._entered[action.stage, microbatch] = layout
        self._incoming[key] = (layout, self.rig.wire.receive(peer, layout.tensors, awaited))

    def _receive_gradients(self, action: Action) -> None:
        microbatch = _microbatch(action)
        key = Key("B", action.stage + 1, microbatch)
        peer, awaited = self._made_by(key)
        strides = self.rig.book.strides(key, peer, awaited)
        layouts = self.rig.stages[action.stage].gradient_layouts(microbatch)
        expected = [
            layout._replace(stride=stride)
            for layout, stride in zip(layouts, strides, strict=True)
            if stride is not None
        ]
        self._incoming[key] = (strides, self.rig.wire.receive(peer, expected, awaited))

    def _arrived(self, key: Key) -> Any:
        """Return what another stage has handed over: a value with leaves, or a list of gradients."""
        if key in self._local:
            return self._local.pop(key)
        layout, receipt = self._incoming.pop(key)
        tensors = receipt.wait()
        if isinstance(layout, Layout):
            return _with_gradients(layout, tensors)
        rest = iter(tensors)
        return [None if stride is None else next(rest) for stride in layout]

    def _made_by(self, key: Key) -> tuple[int, Where]:
        """Return which rank of the pipeline makes something, and what it does to make it."""
        peer = self.plan.rank_of(key.stage, key.microbatch)
        return peer, Where(self.rig.ranks[peer], key.stage, str(key), key.microbatch)

    def _is_here(self, stage: int, microbatch: int) -> bool:
        return self.plan.rank_of(stage, microbatch) == self.rig.rank

    def _is_last(self, action: Action) -> bool:
        return self._last.get(action.stage) == action


def check_finite(loss: Tensor) -> None:
    """Raise where a loss is not finite.

    Raises:
        TorchweaveError: It is NaN or infinite.
    """
    value = float(loss)
    if not math.isfinite(value):
        raise TorchweaveError(
            "The loss of a microbatch is finite",
            given=str(value),
            remedy="look at that microbatch, or build the pipeline with allow_nonfinite_loss=True",
        )


def _recorded(action: Action, run: Callable[[], T], failed: list[Action]) -> T:
    with record_function(f"PP:{action}"):
        try:
            return run()
        except BaseException:
            failed.append(action)
            raise


def _into(found: list[T], action: Action, run: Callable[[], T], failed: list[Action]) -> None:
    found.append(_recorded(action, run, failed))


def _with_gradients(layout: Layout, tensors: Sequence[Tensor]) -> Any:
    for described, tensor in zip(layout.tensors, tensors, strict=True):
        tensor.requires_grad_(described.requires_grad)
    return put_together(layout, tensors)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
