"""Print a pipeline schedule as a grid, simulate it, compare schedules.

NAME is gpipe, 1f1b, interleaved, interleaved-pairs, zb-h1, zbv, dualpipev or dualpipe; `compare` sets all of them side
by side and says which one to take.

  torchweave plan dualpipev --ranks 4 --microbatches 10
  torchweave plan dualpipe --ranks 8 --microbatches 20 --simulate F=1,B=2,W=1,comm=0.5 --svg dualpipe.svg
  torchweave plan compare --ranks 8 --microbatches 32 --simulate comm=0.5,recovered=0.8
  torchweave plan --read torch_schedule.csv

Exit code: 0, 1 where a plan has faults, 2 for a wrong option, 3 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchweave.errors import UsageError

if TYPE_CHECKING:
    from torchweave.schedule.costs import Costs
    from torchweave.schedule.plan import Plan
    from torchweave.schedule.simulate import Simulation

EXIT_FAULTS = 1
COMPARE = "compare"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave plan`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the schedule, or `compare`")
    parser.add_argument("--ranks", type=int, metavar="N", help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches of a step, of both directions")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages on each rank, for the interleaved schedules")
    parser.add_argument(
        "--simulate",
        metavar="COSTS",
        help="costs such as F=1,B=2,W=1,comm=0.5, also I, comm_backward, p2p, recovered; several numbers with / are "
        "one for each stage, such as F=1/1/1/1.5; what is not given has its default (F=1,B=2F,W=B/2,comm=0)",
    )
    parser.add_argument("--read", type=Path, metavar="FILE", help="take the plan from a csv file instead of a name")
    parser.add_argument("--max-activations", type=float, metavar="N", help="the most activations that a rank may hold")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the grid as a picture, in time")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the plan for torch's _load_csv")
    parser.add_argument("--comms", action="store_true", help="with --csv: with sends and receives (compute_comms)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--whole", action="store_true", help="print all of a long grid")


def run(args: argparse.Namespace) -> int:
    """Run `torchweave plan`."""
    # a plan is some hundred thousand tuples without a cycle, which the collector would walk through again and again
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _compare(args) if args.name == COMPARE else _plan(args)
    finally:
        if was_on:
            gc.enable()


def _plan(args: argparse.Namespace) -> int:
    from torchweave.schedule.check import PlanError, check
    from torchweave.schedule.costs import Costs

    costs = Costs.parse(args.simulate) if args.simulate is not None else None
    plan = _given(args)
    try:
        if args.read is not None or args.max_activations is not None:
            check(plan, args.max_activations)
    except PlanError as error:
        print(f"torchweave: {error}", file=sys.stderr)
        return EXIT_FAULTS
    _write(args, plan, costs)
    _show(args, plan, costs)
    return 0


def _given(args: argparse.Namespace) -> Plan:
    """Return the plan that was asked for, by name or by file."""
    if args.read is not None:
        if args.name is not None or args.ranks or args.microbatches or args.chunks:
            raise UsageError(
                "--read takes the whole plan from a file",
                given="a name or numbers beside it",
                remedy="leave out NAME, --ranks, --microbatches and --chunks",
            )
        from torchweave.schedule.files import read_csv

        return read_csv(args.read)
    from torchweave.schedule.build import build

    _need_numbers(args)
    return build(args.name, args.ranks, args.microbatches, args.chunks)


def _need_numbers(args: argparse.Namespace) -> None:
    """Refuse a command line without a name, or without the numbers that a plan is made of."""
    from torchweave.schedule.build import names, recipe_of

    if args.name is None:
        raise UsageError(
            "A plan has a name, or is read from a file",
            given="neither",
            remedy=f"give --read FILE, compare, or one of {', '.join(names())}",
        )
    if args.name != COMPARE:
        recipe_of(args.name)  # a wrong name is told before missing numbers
    if args.ranks is None or args.microbatches is None:
        raise UsageError(
            "A plan needs its numbers of ranks and of microbatches",
            given=f"{args.name} without {'--microbatches' if args.ranks is not None else '--ranks'}",
            remedy="give both, such as --ranks 4 --microbatches 10",
        )


def _write(args: argparse.Namespace, plan: Plan, costs: Costs | None) -> None:
    """Write what goes to files, and say so on standard error."""
    if args.comms and args.csv is None:
        raise UsageError("--comms says what --csv writes", given="--comms alone", remedy="add --csv FILE")
    texts: list[tuple[Path, str]] = []
    if args.csv is not None:
        from torchweave.schedule.files import to_csv
        from torchweave.schedule.passes import add_reduce_grad, add_send_recv, only_compute

        written = add_send_recv(add_reduce_grad(only_compute(plan))) if args.comms else only_compute(plan)
        texts.append((args.csv, to_csv(written)))
    if args.svg is not None:
        texts.append((args.svg, _picture(plan, costs)))
    for path, text in texts:
        from torchweave.reporting.output import open_output

        with open_output(path) as file:
            file.write(text.encode())
        print(f"torchweave: wrote {path}", file=sys.stderr)


def _picture(plan: Plan, costs: Costs | None) -> str:
    from torchweave.schedule.costs import Costs, in_figures
    from torchweave.schedule.svg import Panel, picture

    used = costs or Costs()
    woven, serial = _simulated(plan, used)
    title = f"{plan.name}, {plan.num_ranks} ranks, {plan.num_microbatches} microbatches, {used}"
    panels = [Panel(f"{title}: step {in_figures(woven.step_time)}, bubble {woven.bubble_share:.1%}", woven)]
    if serial is not None and costs is not None:
        title = f"the same with each pair's forward and then its backward: step {in_figures(serial.step_time)}"
        panels.append(Panel(f"{title}, bubble {serial.bubble_share:.1%}", serial))
    return picture(panels)


def _simulated(plan: Plan, costs: Costs) -> tuple[Simulation, Simulation | None]:
    """Return the step with its pairs woven, and with their halves one after the other where there are any."""
    from torchweave.schedule.simulate import simulate

    has_pairs = any(action.parts for row in plan.ranks for action in row)
    return simulate(plan, costs), simulate(plan, costs, woven=False) if has_pairs else None


def _show(args: argparse.Namespace, plan: Plan, costs: Costs | None) -> None:
    """Print the plan."""
    from torchweave.cli import plan_report as report
    from torchweave.schedule.grid import in_time, slots
    from torchweave.schedule.memory import peak_activations
    from torchweave.schedule.passes import only_compute

    plan = only_compute(plan)
    woven, serial = _simulated(plan, costs) if costs is not None else (None, None)
    if args.json:
        print(json.dumps(report.plan_record(plan, costs, woven, serial)))
        return
    grid = in_time(woven) if woven is not None else slots(plan)
    rows = report.plan_lines(plan, grid, report.columns(), None if args.whole else report.MOST_LINES)
    if woven is None:
        rows += [[], *report.memory_lines(peak_activations(plan))]
    else:
        rows += [[], *report.simulation_lines(costs, woven, serial)]
    report.print_rows(rows)


def _compare(args: argparse.Namespace) -> int:
    from torchweave.cli import plan_report as report
    from torchweave.schedule.compare import compare
    from torchweave.schedule.costs import Costs

    _need_numbers(args)
    for option in ("read", "svg", "csv", "comms", "whole"):
        if getattr(args, option):
            raise UsageError(
                f"--{option} belongs to one plan",
                given="compare",
                remedy="give the name of a schedule instead of compare",
            )
    costs = Costs.parse(args.simulate or "")
    found = compare(args.ranks, args.microbatches, costs, args.chunks, args.max_activations)
    if args.json:
        print(json.dumps(report.comparison_record(found)))
    else:
        report.print_rows(report.comparison_lines(found))
    return 0
