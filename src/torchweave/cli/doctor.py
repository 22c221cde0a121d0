"""Say what decides about overlap on this machine: versions, devices, variables, and a short measurement.

Each line is ok, bad or unknown, with the reason. It works without torch and without a device; what cannot be known
there is unknown. With a device it measures for about ten seconds: launch cost, and what runs at once. Exit code: 1
where something is bad, else 0.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict

from torchweave.doctor.judge import Check, judge
from torchweave.reporting.lines import Line, wrapped

EXIT_BAD = 1
SCHEMA = 1
_STYLES = {"ok": "green", "bad": "bold red", "unknown": "yellow"}
_MOST_COLUMNS = 110


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave doctor`."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--no-measurement", action="store_true", help="leave the device alone")


def run(args: argparse.Namespace) -> int:
    """Run `torchweave doctor`."""
    from torchweave.cli.output import print_lines
    from torchweave.doctor.look import look

    if not args.json:
        print("torchweave: looking at this machine; with a device it takes about half a minute", file=sys.stderr)
    machine = look(measure=not args.no_measurement)
    checks = judge(machine)
    bad = any(check.state == "bad" for check in checks)
    if args.json:
        record = {
            "schema": SCHEMA,
            "state": "bad" if bad else "ok",
            "checks": [asdict(check) for check in checks],
            "measured": None if machine.measured is None else asdict(machine.measured),
        }
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
    else:
        print_lines(lines(checks, min(shutil.get_terminal_size((100, 24)).columns, _MOST_COLUMNS)))
    return EXIT_BAD if bad else 0


def lines(checks: tuple[Check, ...], width: int) -> list[Line]:
    """Return the answers as lines of text.

    Args:
        checks: The answers.
        width: Columns of the terminal.
    """
    label = max(len(check.name) for check in checks)
    found: list[Line] = []
    for check in checks:
        found.append(Line(f"{check.state:<8}{check.name:<{label}}  {check.value}", _STYLES[check.state]))
        found += wrapped(check.why, width, " " * (10 + label), "dim")
    counts = {state: sum(check.state == state for check in checks) for state in ("bad", "unknown", "ok")}
    found.append(Line(""))
    found.append(Line(", ".join(f"{number} {state}" for state, number in counts.items()), "bold"))
    return found
