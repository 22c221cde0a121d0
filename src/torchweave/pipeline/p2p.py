"""IDEA: tensors go from rank to rank as bytes, started early and waited for late.

Every rank starts its transfers in the order of the plan, in which no order of two ranks contradicts another: so they
cannot block each other on one communicator either, where a transfer begins only when the one before it has ended.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from torchweave.pipeline.faults import Guard, Where
from torchweave.pipeline.values import TensorLayout

_MOST_SENDS = 8


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
        store: Shared by the pipeline's ranks; None likewise.
        guard: Waits for it.
        device: Where the tensors are.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, store: Store | None, guard: Guard, device: torch.device
    ) -> None:
        self._group, self._store, self._guard, self._device = group, store, guard, device
        self._letters: Counter[tuple[int, int]] = Counter()
        self._sent: deque[tuple[list[dist.Work], list[Tensor], Where]] = deque()

    def send(self, peer: int, tensors: Sequence[Tensor], awaited: Where) -> None:
        """Start to send tensors.

        Args:
            peer: The receiving rank, within the group.
            tensors: What is sent, each without gaps in memory (`laid_out`); kept alive until it has left.
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

    def send_text(self, peer: int, text: str, awaited: Where) -> None:
        """Send a text that the peer waits for on its host.

        With gloo it goes as the tensors go, so that a peer that is gone is noticed at once; with NCCL over the store,
        so that no device is waited for.
        """
        if self._device.type == "cuda":
            assert self._store is not None
            assert self._group is not None
            self._store.set(self._letter(self._group.rank(), peer), text)
            return
        raw = torch.tensor(list(text.encode()), dtype=torch.uint8)
        self.send(peer, [torch.tensor([len(raw)]), raw], awaited)

    def receive_text(self, peer: int, awaited: Where) -> str:
        """Wait for a text on the host.

        Raises:
            PipelineError: It does not come.
        """
        if self._device.type == "cuda":
            assert self._store is not None
            assert self._group is not None
            store, name = self._store, self._letter(peer, self._group.rank())

            def is_here() -> bool:
                with contextlib.suppress(RuntimeError):  # the store is gone, of which the guard knows what to say
                    return bool(store.check([name]))
                return False

            self._guard.wait_on_host(is_here, awaited)
            text = bytes(store.get(name)).decode()
            store.delete_key(name)
            return text
        (length,) = self.receive(peer, [TensorLayout((1,), "int64", False)], awaited).wait()
        (raw,) = self.receive(peer, [TensorLayout((int(length),), "uint8", False)], awaited).wait()
        return bytes(raw.tolist()).decode()

    def _letter(self, sender: int, receiver: int) -> str:
        self._letters[sender, receiver] += 1
        return f"text/{sender}>{receiver}/{self._letters[sender, receiver]}"

    def add_up(self, tensor: Tensor) -> None:
        """Add up a tensor over the pipeline's ranks, in place, and wait on the host: the end of a step.

        Raises:
            PipelineError: A rank failed.
        """
        if self._group is None:
            return
        with self._guard.on_break():
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None
        self._guard.wait(work, None, on_host=True)

    def finish(self) -> None:
        """Wait until everything has left, on the host.

        Raises:
            PipelineError: A rank failed, or does not receive.
        """
        while self._sent:
            self._wait_for_oldest(on_host=True)

    def abandon(self) -> None:
        """Let go of everything after a failure."""
        self._sent.clear()

    def _wait_for_oldest(self, *, on_host: bool = False) -> None:
        works, _, awaited = self._sent.popleft()
        for work in works:
            self._guard.wait(work, awaited, on_host=on_host)

    def _start(self, operation: Any, peer: int, tensors: list[Tensor], awaited: Where) -> list[dist.Work]:
        if not tensors:
            return []
        operations = [dist.P2POp(operation, tensor, group=self._group, group_peer=peer) for tensor in tensors]
        with self._guard.on_break(awaited):  # gloo raises at once where the connection was closed before
            return dist.batch_isend_irecv(operations)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps, as they lie in memory: every dtype goes over every backend so."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
