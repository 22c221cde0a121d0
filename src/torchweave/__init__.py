"""Run the forward of one model chunk and the backward of another at once, or learn why they do not overlap.

Importing this package imports neither torch nor numpy: each public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchweave import pipeline
    from torchweave.engine.crossing import communication
    from torchweave.engine.pair import choices, weave
    from torchweave.errors import TorchweaveError
    from torchweave.record.marks import region, step
    from torchweave.timing import timed
    from torchweave.watching import watch

__all__ = [
    "TorchweaveError",
    "__version__",
    "choices",
    "communication",
    "pipeline",
    "region",
    "step",
    "timed",
    "watch",
    "weave",
]

try:
    __version__ = version("torchweave")
except PackageNotFoundError:  # run from its sources, without installing it
    __version__ = "0+sources"

_HOME = {
    "TorchweaveError": "torchweave.errors",
    "choices": "torchweave.engine.pair",
    "communication": "torchweave.engine.crossing",
    "pipeline": "torchweave.pipeline",
    "region": "torchweave.record.marks",
    "step": "torchweave.record.marks",
    "timed": "torchweave.timing",
    "watch": "torchweave.watching",
    "weave": "torchweave.engine.pair",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module at its first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'torchweave' has no attribute {name!r}")
    try:
        home = import_module(_HOME[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from torchweave.errors import TorchweaveError

        raise TorchweaveError(
            f"torchweave.{name} needs torch", given="a Python without it", remedy="pip install 'torchweave[torch]'"
        ) from error
    globals()[name] = value = home if name == "pipeline" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
