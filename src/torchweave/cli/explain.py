"""Explain a cause: what it is, why it prevents overlap, the evidence for it, and the mend."""

from __future__ import annotations

import argparse

from torchweave.diagnose.causes import cause
from torchweave.source.rules import NAMES as RULES
from torchweave.source.rules import rule


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave explain`."""
    parser.add_argument("cause", metavar="CAUSE", help="its name, as in the report and in `torchweave causes`")


def run(args: argparse.Namespace) -> int:
    """Run `torchweave explain`."""
    about = cause(args.cause.strip().replace("-", "_").replace(" ", "_").lower())
    print(f"{about.name}\n\n{about.page}\n")
    if about.mend:
        print("\n".join(f"    {line}" for line in about.mend.rstrip("\n").splitlines()) + "\n")
    mendable = "The program can mend it" if about.recoverable else "The program cannot mend it"
    where = "a trace shows it" if about.seen_in == "trace" else f"only a {about.seen_in} can show it"
    if about.seen_in == "source":
        where = "only the source can show it"
    print(f"{mendable}; {where}.")
    if about.name in RULES:
        print(f"\n`torchweave check` looks for it in the source:\n\n{rule(about.name).page}")
    return 0
