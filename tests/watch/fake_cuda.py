"""Streams and events made up for tests: they order nothing, and what is asked of them is all there is of them.

Scripts written for a GPU run on them with small tensors of the CPU, line for line. What is asked of the device is then
as on a GPU; when things run is not.
"""

from __future__ import annotations

import contextlib
import re
import threading
import types
from pathlib import Path

import torch
from fake import FakeDevice

POOL = 32
SMALLER = (
    (r"\bdevice=\"cuda\"", 'device="cpu"'),
    (r"\.to\(\"cuda\"", '.to("cpu"'),
    (r"\.cuda\(\)", ""),
    (r"\.pin_memory\(\)", ""),
    (r"pin_memory=True", "pin_memory=False"),
    (r"\b(?:1_500_000|800_000|300_000|60_000|4_000_000)\b", "200"),
    (r"\b(?:10000|10240|6144|4096|2048|16384|8192|1024)\b", "64"),
    (r"\brange\((?:2600|500|300)\)", "range(60)"),
    (r"\b0\.004\b", "0.002"),
)


class Made:
    """The fakes of one process."""

    def __init__(self) -> None:
        # long beside what a busy machine takes to launch them
        self.device = FakeDevice(kernel_us=50_000.0)
        self.device.current_stream = lambda ordinal: self.current().cuda_stream
        # the CPU's memory is given out again without a word: nothing that was seen is freed
        self.kept = []
        self.device.on_device = lambda tensor: self.kept.append(tensor.detach()) or True
        self.local = threading.local()
        self.next_stream = 0
        self.default = None

    def current(self):
        return getattr(self.local, "stream", self.default)


def install(patch):
    """Replace torch.cuda's streams and events.

    Args:
        patch: A function (owner, name, value), as monkeypatch.setattr.

    Returns:
        The device to watch.
    """
    made = Made()

    class Stream:
        def __new__(cls, device=None, priority=0, **kwargs):
            stream = object.__new__(cls)
            number = made.next_stream % POOL + 21
            if "stream_ptr" in kwargs:
                number = 777
            elif "default" in kwargs:
                number = 7
            else:
                made.next_stream += 1
            stream.number, stream.cuda_stream = number, 0 if number == 7 else 0x1000 + number
            return stream

        def __init__(self, *args, **kwargs):
            pass

        def record_event(self, event=None):
            event = event or torch.cuda.Event()
            event.record(self)
            return event

        def wait_event(self, event):
            event.wait(self)

        def wait_stream(self, stream):
            self.wait_event(stream.record_event())

        def synchronize(self):
            pass

    class ExternalStream(Stream):
        def __new__(cls, pointer, device=None):
            return torch.cuda.Stream.__new__(cls, stream_ptr=pointer)

    class Event:
        def __init__(self, *args, **kwargs):
            pass

        def record(self, stream=None):
            pass

        def wait(self, stream=None):
            pass

        def synchronize(self):
            pass

    def set_stream(stream):
        made.local.stream = stream
        made.device.use(stream.number)

    @contextlib.contextmanager
    def stream(wanted):
        before = made.current()
        torch.cuda.set_stream(wanted)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    made.default = Stream(default=True)
    for name, value in {
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "set_stream": set_stream,
        "stream": stream,
        "current_stream": lambda device=None: made.current(),
        "synchronize": lambda device=None: None,
        "cudart": lambda: types.SimpleNamespace(cudaStreamCreate=lambda address: 0),
    }.items():
        patch(torch.cuda, name, value)
    patch(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return made.device


def smaller(script: Path, folder: Path) -> Path:
    """Write a script for the fakes: the same lines, with tensors that a CPU multiplies at once."""
    text = script.read_text(encoding="utf-8")
    for pattern, new in SMALLER:
        text = re.sub(pattern, new, text)
    path = folder / script.name
    path.write_text(text, encoding="utf-8")
    return path
