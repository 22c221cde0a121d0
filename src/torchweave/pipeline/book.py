"""IDEA: how what crosses between stages looks is learnt in a first step, and sent along no more after that."""

from __future__ import annotations

import json
from typing import NamedTuple

from torchweave.errors import UsageError
from torchweave.pipeline.faults import Where
from torchweave.pipeline.p2p import Wire
from torchweave.pipeline.values import Layout


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
        self._pages: dict[str, dict[Key, Layout | list[bool]]] = {}
        self._page: dict[Key, Layout | list[bool]] = {}
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

    def tell(self, key: Key, entry: Layout | list[bool], peer: int, awaited: Where) -> None:
        """Say how a transfer looks, before it is sent.

        Args:
            key: The transfer.
            entry: How it looks: a stage's outputs, or which of its inputs get a gradient.
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
                remedy="build the pipeline with dynamic_shapes=True",
            )

    def layout(self, key: Key, peer: int, awaited: Where) -> Layout:
        """Return how a stage's outputs look that are to be received."""
        entry = self._look_up(key, peer, awaited)
        assert isinstance(entry, Layout)
        return entry

    def present(self, key: Key, peer: int, awaited: Where) -> list[bool]:
        """Return for each of a stage's inputs with gradient whether one is sent back."""
        entry = self._look_up(key, peer, awaited)
        assert isinstance(entry, list)
        return entry

    def known(self, key: Key) -> list[bool] | None:
        """Return which gradients the other side expects, or None while that is still being learnt."""
        entry = None if self._learns else self._page.get(key)
        return entry if isinstance(entry, list) else None

    def _look_up(self, key: Key, peer: int, awaited: Where) -> Layout | list[bool]:
        if self._learns:
            text = self._wire.receive_text(peer, awaited)
            self._page[key] = Layout.decode(text) if key.kind == "F" else json.loads(text)
        return self._page[key]


def _told(entry: Layout | list[bool] | None) -> str:
    return f"gradients {entry}" if isinstance(entry, list) else str(entry)
