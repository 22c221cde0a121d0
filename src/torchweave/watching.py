"""IDEA: watch a block of a program, and ask why its work on the device did not overlap."""

from __future__ import annotations

import html
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchweave.errors import TorchweaveError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Literal

    from torchweave.diagnose.model import Diagnosis
    from torchweave.record.device import Device
    from torchweave.record.session import Recording, Session

_WIDTH, _FRAME_HEIGHT = 100, 900


class Report:
    """Why the work of a watched block did not overlap; prints as text, shows as HTML in a notebook.

    Args:
        diagnosis: The record that it is made from.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis

    def __str__(self) -> str:
        from torchweave.reporting.lines import plain
        from torchweave.reporting.text import report

        return plain(report(self.diagnosis, _WIDTH))

    def __repr__(self) -> str:
        return f"<torchweave report: {self.diagnosis.sentence}>"

    def to_json(self) -> str:
        """Return the JSON that `torchweave why --json` prints."""
        from torchweave.reporting.record import to_json

        return to_json([self.diagnosis], as_list=False)

    def to_html(self) -> str:
        """Return the page that `torchweave why --html` writes."""
        from torchweave.reporting.html import render_html

        return render_html([self.diagnosis])

    def _repr_html_(self) -> str:
        # a page of its own inside the notebook's: neither's styles reach the other
        page = html.escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {_FRAME_HEIGHT}px; border: 0"></iframe>'


class Watch:
    """The object that `watch()` gives to the block; ask it for its report after the block."""

    def __init__(self, *, skip: int | None = None, steps: int | None = None, device: Device | None = None) -> None:
        if skip is not None and steps is None:
            raise UsageError("`skip` goes with `steps`", given=f"skip={skip}", remedy="say how many steps to watch")
        for name, value, least in (("skip", skip, 0), ("steps", steps, 1)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UsageError(f"`{name}` is a whole number from {least}", given=repr(value))
        self._skip, self._steps, self._device = skip, steps, device
        self._session: Session | None = None
        self._recording: Recording | None = None
        self._state: Literal["new", "running", "over"] = "new"
        self._blind = False

    def __enter__(self) -> Watch:
        if self._state != "new":
            raise UsageError(
                "A watch watches one block, once",
                given="a watch that was started before",
                remedy="write `with torchweave.watch() as w:` anew for each block",
            )
        device = self._device or find_device()
        if device is None:
            # the same program has to run where there is no device; its report says so
            self._blind = True
        else:
            from torchweave.record.phases import Phases
            from torchweave.record.session import Session

            phases = None if self._steps is None else Phases(self._skip, self._steps)
            self._session = Session(device, phases)
            self._session.begin()
        self._state = "running"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self._state = "over"
        if self._session is not None:
            told = "" if error is None else f"{type(error).__name__}: {error}"
            self._recording = self._session.end(told)
            self._session = None
        return False

    def save(self, path: str | Path) -> None:
        """Keep the recording in a file, which `torchweave why FILE` reads on any machine.

        Args:
            path: The file; one that exists is replaced.

        Raises:
            UsageError: The block has not ended, or the file cannot be written.
        """
        self._found().save(Path(path))

    def report(self, *, between: Sequence[str] | None = None, range_name: str | None = None) -> Report:
        """Say why the block's work did not overlap.

        Args:
            between: The two sides, as in `torchweave why --between`.
            range_name: Look only at the work of regions of this name.

        Returns:
            The report, also where the block ended with an exception: of what ran before it.

        Raises:
            UsageError: The block has not ended, or the sides or the range select nothing.
            TorchweaveError: There was nothing to measure.
        """
        from torchweave.diagnose.verdicts import diagnose
        from torchweave.trace.read import read

        found = self._found()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "watched block"
            found.save(path)
            timeline = read(path)
        return Report(diagnose(replace(timeline, file=path.name), between=between, range_name=range_name))

    def _found(self) -> Recording:
        if self._state != "over":
            raise UsageError(
                "A watch is asked after its block has ended",
                given="a block that has not ended" if self._state == "running" else "a watch that was never started",
                remedy="ask below the `with` block",
            )
        if self._recording is None:
            raise TorchweaveError(
                "A watch measures a CUDA device",
                given="there is none here" if self._blind else "nothing was recorded",
                remedy="run it on a machine with a GPU; `torchweave check SCRIPT` reads the source anywhere",
            )
        return self._recording


def watch(*, skip: int | None = None, steps: int | None = None) -> Watch:
    """Watch what a block does on the device.

    Args:
        skip: Steps to leave out first; None leaves out steps until they take equally long. Goes with `steps`.
        steps: Steps to watch, by `torchweave.step()` or an optimizer's; None watches the whole block.

    Returns:
        A context manager; after the block its `report()` says why the work did not overlap. Exceptions of the block
        pass through. A process is watched by one at a time, on all its threads; without a device the block runs as it
        is.

    Raises:
        UsageError: The numbers are none, or the process is being watched already (when the block is entered).
    """
    return Watch(skip=skip, steps=steps)


def find_device() -> Device | None:
    """Return the device to watch, None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    from torchweave.record.device import Cuda

    return Cuda()
