"""Looks at times where the program's threads are: what a host did between two operators has no other witness."""

from __future__ import annotations

import sys
import threading

from torchweave import frames
from torchweave.record.writer import Writer

PERIOD_S = 0.002
_LIMIT_S = 5.0


def compiles() -> bool:
    """Return whether the program has compiled anything with `torch.compile`.

    The compiler runs frames of its own: a function mode would be taken into its graphs, and to hold its frames from
    another thread is not safe.
    """
    converted = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(converted, "FRAME_COUNTER", 0))


class Sampler:
    """A thread that samples the others while the writer is on.

    Args:
        writer: Where to write.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchweave sampler", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Stop it and wait for it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_LIMIT_S)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            if self._writer.on and not compiles():
                self._look()

    def _look(self) -> None:
        """Look once; another thread's frame must not live on because of us, so all names here end with it."""
        writer = self._writer
        numbers = {thread.ident: thread.native_id for thread in threading.enumerate()}
        with frames.others() as others:
            for ident, frame in others.items():
                number = numbers.get(ident)
                # threads that never asked anything of a device are of no interest
                if number is not None and number in writer.seen:
                    writer.sample(number, frame)
