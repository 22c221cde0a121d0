"""IDEA: how what crosses between stages looks is learnt in a first step, and sent along no more after that."""

from __future__ import annotations

import json
from typing import NamedTuple

from torchweave.errors import UsageError
from torchweave.pipeline.faults import Where
from torchweave.pipeline.p2p import Wire
from torchweave.pipeline.values import Layout

# how the gradients of a stage's inputs look: the strides of each, or None where there is none
Strides = list[tuple[int, ...] | None]
Entry = Layout | Strides


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


class Book:
    """How the transfers of a step look: learnt in the first step with inputs of these shapes, then known.

    Args:
        wire: Carries what is learnt.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._pages: dict[str, dict[Key, Entry]] = {}
        self._page: dict[Key, Entry] = {}
        self._learns = True

    def open(self, signature: str, *, learn: bool) -> None:
        """Begin a step.

        Args:
            signature: What the shapes follow from, the same text on every rank.
            learn: Whether to learn them although they are known.
        """
        self._learns = learn or signature not in self._pages
        if self._learns:
            self._page = {}
        else:
            self._page = self._pages[signature]

    def close(self, signature: str) -> None:
        """Keep what was learnt, at the end of a step that every rank has ended."""
        self._pages[signature] = self._page

    def settled(self, key: Key, entry: Entry) -> Entry:
        """Return how a transfer is to look that could be sent so: as in the step in which it was learnt, if it fits.

        What lies in memory in another order is put in order, and a gradient that is not there goes as zeros.

        Args:
            key: The transfer.
            entry: How it looks now.
        """
        known = None if self._learns else self._page.get(key)
        if isinstance(entry, Layout):
            return known if isinstance(known, Layout) and entry.is_like(known) else entry
        if not isinstance(known, list) or any(e is not None and k is None for e, k in zip(entry, known, strict=True)):
            return entry
        return known

    def tell(self, key: Key, entry: Entry, peer: int, awaited: Where) -> None:
        """Say how a transfer looks, before it is sent.

        Args:
            key: The transfer.
            entry: How it looks, `settled`: a stage's outputs, or the gradients of its inputs.
            peer: The receiving rank, within the pipeline.
            awaited: What the peer needs it for.

        Raises:
            UsageError: It looks otherwise than in the step in which it was learnt.
        """
        if self._learns:
            self._page[key] = entry
            self._wire.send_text(peer, entry.encode() if isinstance(entry, Layout) else json.dumps(entry), awaited)
        elif (known := self._page.get(key)) != entry:
            raise UsageError(
                "What a stage passes on looks the same in every step whose inputs look the same",
                given=f"{key} is {_told(entry)}, and was {_told(known)}",
                remedy="build the pipeline again where the model was changed (weights frozen, another dtype); else "
                "build it with dynamic_shapes=True",
            )

    def layout(self, key: Key, peer: int, awaited: Where) -> Layout:
        """Return how a stage's outputs look that are to be received."""
        entry = self._look_up(key, peer, awaited)
        assert isinstance(entry, Layout)
        return entry

    def strides(self, key: Key, peer: int, awaited: Where) -> Strides:
        """Return for each of a stage's inputs with gradient the strides of the one that is sent back, if one is."""
        entry = self._look_up(key, peer, awaited)
        assert isinstance(entry, list)
        return entry

    def _look_up(self, key: Key, peer: int, awaited: Where) -> Entry:
        if self._learns:
            text = self._wire.receive_text(peer, awaited)
            self._page[key] = Layout.decode(text) if key.kind == "F" else _decoded(text)
        return self._page[key]


def _decoded(text: str) -> Strides:
    return [None if strides is None else tuple(strides) for strides in json.loads(text)]


def _told(entry: Entry | None) -> str:
    if isinstance(entry, list):
        return "gradients for " + (", ".join(str(at) for at, one in enumerate(entry) if one is not None) or "no input")
    return str(entry)
