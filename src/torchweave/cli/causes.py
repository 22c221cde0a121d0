"""List the causes that a report can name, each in one line."""

from __future__ import annotations

import argparse

from torchweave.diagnose.causes import all_causes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave causes`: there are none."""


def run(args: argparse.Namespace) -> int:  # noqa: ARG001 (every subcommand takes its arguments)
    """Run `torchweave causes`."""
    rows = all_causes()
    width = max(len(row.name) for row in rows)
    for row in rows:
        note = "" if row.seen_in == "trace" else f" [{row.seen_in} only]"
        print(f"{row.name:<{width}}  {row.line}{note}")
    return 0
