"""Weave a small mixture-of-experts model and print what it gained (not built yet)."""

from __future__ import annotations

import argparse

from torchweave.errors import TorchweaveError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave demo`."""


def run(args: argparse.Namespace) -> int:
    """Run `torchweave demo`."""
    raise TorchweaveError("The demo is not built yet")
