"""IDEA: tensors go from rank to rank as bytes, started early and waited for late; how they look is learnt once.

Every rank starts its transfers in the order of the plan, in which no order of two ranks contradicts another: so they
cannot block each other on one communicator either, where a transfer begins only when the one before it has ended.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from torchweave.errors import UsageError
from torchweave.pipeline.faults import Guard, Where
from torchweave.pipeline.values import Layout, TensorLayout

_MOST_SENDS = 8


class Key(NamedTuple):
    """What a transfer carries.

    Attributes:
        kind: `F` for a stage's outputs, `B` for the gradients of its inputs.
        stage: The stage that made them.
        microbatch: The microbatch.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Receipt:
    """Tensors that are on their way to this rank."""

    def __init__(self, guard: Guard, works: Sequence[dist.Work], tensors: Sequence[Tensor], awaited: Where) -> None:
        self._guard, self._works, self._tensors, self._awaited = guard, works, tensors, awaited

    def wait(self) -> list[Tensor]:
        """Wait until they are here, and return them.

        Raises:
            PipelineError: They do not come.
        """
        for work in self._works:
            self._guard.wait(work, self._awaited)
        return list(self._tensors)


class Wire:
    """Sends and receives for one rank of a pipeline.

    Args:
        group: The pipeline's own group; None for a pipeline of one rank, which sends nothing.
        guard: Waits for it.
        device: Where the tensors are.
    """

    def __init__(self, group: dist.ProcessGroup | None, guard: Guard, device: torch.device) -> None:
        self._group, self._guard, self._device = group, guard, device
        self._sent: deque[tuple[list[dist.Work], list[Tensor], Where]] = deque()

    def send(self, peer: int, tensors: Sequence[Tensor], awaited: Where) -> None:
        """Start to send tensors.

        Args:
            peer: The receiving rank, within the group.
            tensors: What is sent; kept alive until it has left.
            awaited: What the peer needs them for.
        """
        while len(self._sent) >= _MOST_SENDS:
            self._wait_for_oldest()
        raw = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        self._sent.append((self._start(dist.isend, peer, raw, awaited), raw, awaited))

    def receive(self, peer: int, layouts: Sequence[TensorLayout], awaited: Where) -> Receipt:
        """Start to receive tensors.

        Args:
            peer: The sending rank, within the group.
            layouts: How they look.
            awaited: What the peer does to make them.
        """
        tensors = [layout.empty(self._device) for layout in layouts]
        works = self._start(dist.irecv, peer, [_bytes_of(tensor) for tensor in tensors if tensor.numel()], awaited)
        return Receipt(self._guard, works, tensors, awaited)

    def add_up(self, tensor: Tensor) -> None:
        """Add up a tensor over the pipeline's ranks, in place, and wait on the host: the end of a step.

        Raises:
            PipelineError: A rank failed.
        """
        if self._group is None:
            return
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._guard.behind(error, None) from error
        assert work is not None
        if self._device.type == "cuda":
            self._guard.wait_on_host(work.is_completed, None)
        self._guard.wait(work, None)

    def finish(self) -> None:
        """Wait until everything has left, on the host.

        Raises:
            PipelineError: A rank failed, or does not receive.
        """
        while self._sent:
            works, _, awaited = self._sent[0]
            if self._device.type == "cuda":
                self._guard.wait_on_host(lambda works=works: all(work.is_completed() for work in works), awaited)  # type: ignore[misc]
            self._wait_for_oldest()

    def abandon(self) -> None:
        """Let go of everything after a failure."""
        self._sent.clear()

    def _wait_for_oldest(self) -> None:
        works, _, awaited = self._sent.popleft()
        for work in works:
            self._guard.wait(work, awaited)

    def _start(self, operation: Any, peer: int, tensors: list[Tensor], awaited: Where) -> list[dist.Work]:
        if not tensors:
            return []
        operations = [dist.P2POp(operation, tensor, group=self._group, group_peer=peer) for tensor in tensors]
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:  # gloo: the connection was closed before
            raise self._guard.behind(error, awaited) from error


class Book:
    """How the transfers of a step look: learnt in the first step with inputs of these shapes, then known.

    Args:
        guard: Waits for the other ranks.
        store: Where ranks tell each other; None for a pipeline of one rank.
    """

    def __init__(self, guard: Guard, store: Store | None) -> None:
        self._guard, self._store = guard, store
        self._pages: dict[str, dict[Key, Layout | list[bool]]] = {}
        self._page: dict[Key, Layout | list[bool]] = {}
        self._session = 0
        self._learns = True

    def open(self, signature: str, *, learn: bool) -> None:
        """Begin a step.

        Args:
            signature: What the shapes follow from, the same text on every rank.
            learn: Whether to learn them although they are known.
        """
        self._learns = learn or signature not in self._pages
        if self._learns:
            self._session += 1
            self._page = {}
        else:
            self._page = self._pages[signature]

    def close(self, signature: str) -> None:
        """Keep what was learnt, at the end of a step that every rank has ended."""
        self._pages[signature] = self._page

    def tell(self, key: Key, entry: Layout | list[bool]) -> None:
        """Say how a transfer looks, before it is sent.

        Raises:
            UsageError: It looks otherwise than in the step in which it was learnt.
        """
        if self._learns:
            self._page[key] = entry
            if self._store is not None:
                text = entry.encode() if isinstance(entry, Layout) else json.dumps(entry)
                self._store.set(f"layout/{self._session}/{key}", text)
        elif (known := self._page.get(key)) != entry:
            raise UsageError(
                "What a stage passes on looks the same in every step whose inputs look the same",
                given=f"{key} is {_told(entry)}, and was {_told(known)}",
                remedy="build the pipeline with dynamic_shapes=True",
            )

    def layout(self, key: Key, awaited: Where) -> Layout:
        """Return how a stage's outputs look that are to be received."""
        entry = self._look_up(key, awaited)
        assert isinstance(entry, Layout)
        return entry

    def present(self, key: Key, awaited: Where) -> list[bool]:
        """Return for each of a stage's inputs with gradient whether one is sent back."""
        entry = self._look_up(key, awaited)
        assert isinstance(entry, list)
        return entry

    def known(self, key: Key) -> list[bool] | None:
        """Return which gradients the other side expects, or None while that is still being learnt."""
        entry = None if self._learns else self._page.get(key)
        return entry if isinstance(entry, list) else None

    def _look_up(self, key: Key, awaited: Where) -> Layout | list[bool]:
        if key not in self._page:
            assert self._store is not None
            store, name = self._store, f"layout/{self._session}/{key}"
            self._guard.wait_on_host(lambda: store.check([name]), awaited)
            text = bytes(store.get(name)).decode()
            store.delete_key(name)
            self._page[key] = Layout.decode(text) if key.kind == "F" else json.loads(text)
        return self._page[key]


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: every dtype goes over every backend so."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _told(entry: Layout | list[bool] | None) -> str:
    return f"gradients {entry}" if isinstance(entry, list) else str(entry)
