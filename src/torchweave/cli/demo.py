"""Weave a small mixture-of-experts model and print what it gained.

Trains on text that Python ships, compares loss and gradients with a serial run bit by bit, and measures one pair in
four ways: serial, woven, computation alone, communication alone. Without torchrun it starts the ranks itself: two
local processes over gloo, or one for each GPU over NCCL. The exit code is 0 only if everything is bit-equal.

Unless several GPUs are there, the link between the ranks is simulated, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchweave.errors import TorchweaveError, UsageError

EXIT_DIFFERENT = 1
LIMIT_S = 900.0
_COUNTS = ("ranks", "layers", "hidden", "tokens")
_HEAD = 64  # width of an attention head
_BUSY = 0.25  # quartiles farther apart than this part of the median say more of the machine than of the pair


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave demo`."""
    parser.add_argument("--ranks", type=int, help="local processes; default: 2, or one for each GPU")
    parser.add_argument("--layers", type=int, help="layers of the model; default: 2, on a GPU 4")
    parser.add_argument("--hidden", type=int, help="width of a token, a multiple of 64; default: 1024, on a GPU 4096")
    parser.add_argument("--tokens", type=int, help="tokens in a microbatch; default: 512, on a GPU 4096")
    parser.add_argument(
        "--link-gbps",
        type=float,
        help="speed of the simulated link, in gigabits (not bytes) a second; 0: no simulated link",
    )
    parser.add_argument(
        "--link-sms",
        type=int,
        default=1,
        help="SMs that the simulated link holds on a GPU; 1 stands for a copy engine, 8 or 32 for NCCL's channels "
        "(default: 1)",
    )
    parser.add_argument("--steps", type=int, default=5, help="training steps before measuring; default: 5")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run `torchweave demo`: start the ranks, or be one of them."""
    _check(args)
    try:
        from torchweave.measure import launch, training
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TorchweaveError(
            "The demo needs torch", given="a Python without it", remedy="pip install 'torchweave[torch]'"
        ) from error
    if not launch.is_launched():
        ranks = args.ranks or training.num_gpus() or 2
        return launch.start_ranks(_words(args), ranks, limit_s=LIMIT_S, passes=(0, EXIT_DIFFERENT))
    names = ("layers", "hidden", "tokens", "link_gbps", "link_sms", "steps")
    options = training.DemoOptions(**{name: getattr(args, name) for name in names})
    with _progress() as progress:
        result = training.run_demo(options, progress)
    if result is None:
        return 0
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0 if result["bit_equal"] else EXIT_DIFFERENT


def _check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be."""
    for name in _COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is at least 1", given=str(value), remedy="leave it out for the default")
    if args.hidden is not None and args.hidden % _HEAD:
        raise UsageError(
            f"--hidden is a multiple of {_HEAD}, the width of an attention head",
            given=str(args.hidden),
            remedy=f"--hidden {-(-args.hidden // _HEAD) * _HEAD}",
        )
    if args.steps < 0:
        raise UsageError("--steps is not negative", given=str(args.steps), remedy="--steps 0 only measures")
    if args.link_gbps is not None and not 0 <= args.link_gbps < float("inf"):
        raise UsageError(
            "--link-gbps is a speed in gigabits a second",
            given=str(args.link_gbps),
            remedy="a number above 0, or 0 for no simulated link",
        )
    if args.link_sms < 1:
        raise UsageError("--link-sms is at least 1", given=str(args.link_sms), remedy="1 for a copy engine")


def _words(args: argparse.Namespace) -> list[str]:
    """Return the command line again, for the ranks."""
    words = ["demo"]
    for name in (*_COUNTS, "link_gbps", "link_sms", "steps"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, "--json"] if args.json else words


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


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
