"""Say what a change did: two traces of the same program, before and after it.

Exit code: 0 where both could be compared (also where nothing became better), 2 for a wrong option, 3 for a file
that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchweave.cli.why import parse_window


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave compare`."""
    parser.add_argument("before", metavar="BEFORE", help="the trace before the change")
    parser.add_argument("after", metavar="AFTER", help="the trace after it")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--between", nargs=2, metavar=("A", "B"), help="the two sides, as in `torchweave why`")
    parser.add_argument("--window", metavar="A..B", help="only this time, in ms after the first device work")
    parser.add_argument("--range", dest="range_name", metavar="NAME", help="only work of this user annotation")


def run(args: argparse.Namespace) -> int:
    """Run `torchweave compare`."""
    from torchweave.cli.output import print_lines
    from torchweave.diagnose.ranks import diagnose_files
    from torchweave.reporting.changes import compare, lines, to_json

    window = parse_window(args.window)
    files = [Path(args.before), Path(args.after)]
    found = diagnose_files(files, between=args.between, window_ms=window, range_name=args.range_name)
    for error in found.errors:
        raise error
    result = compare(*found.diagnoses)
    if args.json:
        sys.stdout.write(to_json(result))
    else:
        print_lines(lines(result))
    return 0
