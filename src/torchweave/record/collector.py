"""When Python's garbage collector ran: it stops whatever thread it comes upon."""

from __future__ import annotations

import gc

from torchweave.record.writer import Writer, now


class Collector:
    """Follows the garbage collector during one watched run.

    Args:
        writer: Where to write.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._begun = writer, 0

    def begin(self) -> None:
        """Ask to be told of collections."""
        gc.callbacks.append(self._collected)

    def end(self) -> None:
        """Ask no more."""
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = now()
        elif self._writer.on and self._begun:
            row = (self._begun, now(), self._writer.thread(), info.get("generation", -1))
            self._writer.tables.collections.extend(row)
