"""Measure one forward and one backward: serial, woven by each strategy, and both bounds.

All timings are taken in turn, round after round, so that a drifting clock changes none of the shares. Without
torchrun it starts the ranks itself: two local processes over gloo, or one for each GPU over NCCL. Unless several GPUs
are there, the link between the ranks is simulated, and the table says so.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchweave.cli.ranks import add_sizes, check_sizes, progress_bar, start_unless_launched, subject_options
from torchweave.errors import UsageError
from torchweave.measure.sizes import CHUNKS

EXIT_DIFFERENT = 1
_STRATEGIES = ("turns", "streams", "auto")
_OPTIONS = (
    *("ranks", "layers", "hidden", "tokens", "link_gbps", "link_sms"),
    *("chunk", "top_k", "link_ms", "rounds", "strategies", "json", "html"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave bench`."""
    parser.add_argument(
        "--chunk",
        choices=CHUNKS,
        default=CHUNKS[0],
        help="a mixture of experts with a fixed capacity (default), one that drops no token, a dense chunk with tensor "
        "parallelism, or a dense one that communicates nothing",
    )
    add_sizes(parser)
    parser.add_argument("--top-k", type=int, help="to how many experts a token goes; default: 1, on a GPU 4")
    parser.add_argument("--link-ms", type=float, help="instead of a speed: how long an exchange takes on the link, ms")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each timing; default: 20")
    parser.add_argument(
        "--strategies", nargs="+", choices=_STRATEGIES, default=list(_STRATEGIES), help="default: all of them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one HTML page, which needs no network")


def run(args: argparse.Namespace) -> int:
    """Run `torchweave bench`: start the ranks, or be one of them."""
    check_sizes(args)
    if args.rounds < 2:
        raise UsageError(
            "A median and its spread need at least two rounds", given=str(args.rounds), remedy="--rounds 20"
        )
    if args.link_ms is not None and not 0 < args.link_ms < float("inf"):
        raise UsageError("--link-ms is a time above 0", given=str(args.link_ms), remedy="such as --link-ms 0.84")
    if args.link_ms is not None and args.link_gbps is not None:
        raise UsageError("A link has one speed", given="--link-ms and --link-gbps", remedy="give one of them")
    if args.html:
        from torchweave.reporting.output import check_output

        check_output(args.html)
    code = start_unless_launched(args, "bench", _OPTIONS, (0, EXIT_DIFFERENT))
    if code is not None:
        return code
    from torchweave.measure.bench import BenchOptions, run_bench

    with progress_bar() as progress:
        result = run_bench(BenchOptions(subject_options(args), tuple(args.strategies), args.rounds), progress)
    if result is None:
        return 0
    result = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **result}
    if args.html:
        from torchweave.reporting.bench import write_html

        write_html(result, args.html)
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0 if all(row["bit_equal"] for row in result["strategies"].values()) else EXIT_DIFFERENT


def _print_table(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from torchweave.reporting.bench import facts, table

    columns, rows = table(result)
    title = escape(f"One forward and one backward, {result['ranks']} ranks, {result['device']}")
    drawn = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1))
    for at, column in enumerate(columns):
        drawn.add_column(column, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    console = Console()
    console.print(drawn)
    grid = Table.grid(padding=(0, 2))
    for name, value in facts(result):
        grid.add_row(f" {name}", escape(value))
    console.print(grid)
