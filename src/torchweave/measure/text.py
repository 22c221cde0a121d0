"""IDEA: real text without a download: the sources that Python itself ships, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from torchweave.errors import UnreadableInputError


def python_text(max_bytes: int = 1 << 20) -> torch.Tensor:
    """Return text that comes with every Python: the sources of its standard library, in the order of their names.

    Args:
        max_bytes: How much of it at most.

    Returns:
        Bytes, shape (n,), uint8.

    Raises:
        UnreadableInputError: This Python has no sources on disk.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    missing = max_bytes
    for path in sorted(folder.glob("*.py")):
        part = path.read_bytes()[:missing]
        parts.append(part)
        missing -= len(part)
        if missing <= 0:
            break
    text = b"".join(parts)
    if len(text) < 1 << 14:
        raise UnreadableInputError(
            "The text to train on is Python's own standard library",
            given=f"{len(text)} bytes of sources in {folder}",
            remedy="use a Python that ships its sources",
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Random cuts of a text, the same for the same seed.

    Args:
        text: Bytes, shape (n,), uint8.
        batch: Sequences in a batch.
        sequence: Tokens in a sequence; a batch has one byte more, the last one's target.
        seed: Of the generator; give each rank its own.
        device: Where batches are put.
    """

    def __init__(self, text: torch.Tensor, batch: int, sequence: int, seed: int, device: torch.device) -> None:
        self._text, self._batch, self._length, self._device = text, batch, sequence + 1, device
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        """Return the next batch, shape (batch, sequence + 1), int64."""
        last = len(self._text) - self._length
        begins = torch.randint(0, last + 1, (self._batch,), generator=self._generator)
        rows = [self._text[begin : begin + self._length] for begin in begins.tolist()]
        return torch.stack(rows).to(device=self._device, dtype=torch.int64)
