"""Weave a small mixture-of-experts model and print what it gained.

Trains on text that Python ships, compares loss and gradients with a serial run bit by bit, and measures one pair in
four ways: serial, woven, computation alone, communication alone. Without torchrun it starts the ranks itself: two
local processes over gloo, or one for each GPU over NCCL. The exit code is 0 only if everything is bit-equal.

Unless several GPUs are there, the link between the ranks is simulated, and the table says so.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from torchweave.cli.ranks import add_sizes, check_sizes, progress_bar, start_unless_launched, subject_options
from torchweave.errors import UsageError

EXIT_DIFFERENT = 1
_OPTIONS = ("ranks", "layers", "hidden", "tokens", "link_gbps", "link_sms", "steps", "json")
_BUSY = 0.25  # quartiles farther apart than this part of the median say more of the machine than of the pair


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave demo`."""
    add_sizes(parser)
    parser.add_argument("--steps", type=int, default=5, help="training steps before measuring; default: 5")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run `torchweave demo`: start the ranks, or be one of them."""
    check_sizes(args)
    if args.steps < 0:
        raise UsageError("--steps is not negative", given=str(args.steps), remedy="--steps 0 only measures")
    code = start_unless_launched(args, "demo", _OPTIONS, (0, EXIT_DIFFERENT))
    if code is not None:
        return code
    from torchweave.measure.training import DemoOptions, run_demo

    with progress_bar() as progress:
        result = run_demo(DemoOptions(subject_options(args), args.steps), progress)
    if result is None:
        return 0
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0 if result["bit_equal"] else EXIT_DIFFERENT


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"One forward and one backward, {result['ranks']} ranks, {escape(result['device'])}")
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column("quartiles", justify="right")
    for key, label in (
        ("serial", "serial"),
        ("woven", "woven"),
        ("compute", "compute alone"),
        ("communication", "communication alone"),
    ):
        low, high = result["spread"][key]
        table.add_row(label, f"{result[f'{key}_ms']:.1f} ms", f"{low:.1f} - {high:.1f} ms")
    table.add_row("bound", f"{result['bound_ms']:.1f} ms", "", end_section=True)
    table.add_row("hidden communication", _share(result["hidden_share"]), "")
    table.add_row("recovered share", _share(result["recovered_share"]), "")
    table.add_row("bit-equal to serial", "yes" if result["bit_equal"] else "NO", "")
    facts = Table.grid(padding=(0, 2))
    for key in ("strategy", "link"):
        facts.add_row(f" {key}", escape(str(result[key])))
    facts.add_row(" versions", escape(", ".join(f"{name} {which}" for name, which in result["versions"].items())))
    if (scatter := _scatter(result)) > _BUSY:
        facts.add_row(" note", f"quartiles lie {scatter:.0%} apart: the machine is busy, run again when it is quiet")
    console = Console()
    console.print(table)
    console.print(facts)


def _scatter(result: dict[str, Any]) -> float:
    """Return how far the quartiles of the four timings lie apart at most, as a part of the median."""
    return max(float((high - low) / result[f"{key}_ms"]) for key, (low, high) in result["spread"].items())


def _share(value: float | None) -> str:
    return "nothing to hide" if value is None else f"{value:.2f}"
