"""Explain a cause: what it is, why it prevents overlap, the evidence for it, and the mend."""

from __future__ import annotations

import argparse
import os
import sys

from torchweave.diagnose.causes import cause
from torchweave.source.rules import NAMES as RULES
from torchweave.source.rules import rule


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave explain`."""
    parser.add_argument("cause", metavar="CAUSE", help="its name, as in the report and in `torchweave causes`")


def run(args: argparse.Namespace) -> int:
    """Run `torchweave explain`."""
    about = cause(args.cause.strip().replace("-", "_").replace(" ", "_").lower())
    parts = [about.name, about.page]
    if about.mend:
        parts.append("\n".join(f"    {line}" for line in about.mend.rstrip("\n").splitlines()))
    mendable = "The program can mend it" if about.recoverable else "The program cannot mend it"
    where = "a trace shows it" if about.seen_in == "trace" else f"only a {about.seen_in} can show it"
    if about.seen_in == "source":
        where = "only the source can show it"
    parts.append(f"{mendable}; {where}.")
    if about.name in RULES:
        parts += ["`torchweave check` looks for it in the source:", rule(about.name).page.rstrip("\n")]
    _print("\n\n".join(parts))
    return 0


def _print(page: str) -> None:
    """Print Markdown: drawn on a terminal, as it is elsewhere or where NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        print(page)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(page), width=min(console.width, 100))
