"""A plan, a simulation and a comparison as lines of text, and as one JSON object each."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from torchweave.cli.terminal import can_print
from torchweave.schedule.compare import Candidate, Comparison
from torchweave.schedule.costs import Costs, in_figures
from torchweave.schedule.grid import Grid, Row, draw, plain
from torchweave.schedule.memory import peak_activations
from torchweave.schedule.plan import Plan
from torchweave.schedule.simulate import Simulation

# rich's words; Okabe and Ito's colours, as in the picture
_STYLES = {
    "F": "#ffffff on #0072B2",
    "B": "#000000 on #E69F00",
    "I": "#000000 on #CC79A7",
    "W": "#ffffff on #009E73",
    "pair": "bold #000000 on #F0E442",
    "head": "dim",
    "rank": "bold",
    "idle": "dim",
    "title": "bold",
}
_MOST_RUNS = 8
_NARROWEST = 40
# a grid of more lines is cut, unless all of it is asked for
MOST_LINES = 120
_ASCII = str.maketrans({"─": "-", "·": "."})


def columns() -> int:
    """Return how many columns a grid may have."""
    return max(shutil.get_terminal_size((100, 24)).columns, _NARROWEST)


def plan_lines(plan: Plan, grid: Grid, width: int, max_lines: int | None) -> list[Row]:
    """Return a plan's head, its grid, and a line on how to read it.

    Args:
        plan: The plan.
        grid: Its cells.
        width: Columns of the terminal.
        max_lines: See `torchweave.schedule.grid.draw`.
    """
    replicas = ", each on 2 ranks" if plan.num_directions > 1 else ""
    facts = f"{plan.num_ranks} ranks, {plan.num_stages} stages{replicas}, {plan.num_microbatches} microbatches"
    key: Row = [("", ""), ("sFm", "F"), (" forward of microbatch m through stage s  ", "")]
    kinds = {leaf.kind for row in plan.ranks for action in row for leaf in action.leaves()}
    for kind, name in (("B", "backward"), ("I", "input gradient"), ("W", "weight gradient")):
        key += [(kind, kind), (f" {name}  ", "")] if kind in kinds else []
    if any(action.parts for row in plan.ranks for action in row):
        key += [("F;B", "pair"), (" pair", "")]
    return [[(plan.name, "title"), (f": {facts}", "")], [], *draw(grid, width, max_lines), [], key]


def memory_lines(peaks: Sequence[int]) -> list[Row]:
    """Return what can be told without costs: the memory.

    Args:
        peaks: For each rank, the most activations that are alive at once.
    """
    return [[("activations alive at most: ", "title"), (_grouped(peaks), "")]]


def simulation_lines(costs: Costs | None, woven: Simulation, serial: Simulation | None) -> list[Row]:
    """Return step time, bubbles and memory.

    Args:
        costs: What was simulated.
        woven: The simulation.
        serial: The same with pairs run one half after the other; None where there are no pairs.
    """
    from torchweave.reporting.table import aligned

    head = ("", "step", "bubble", "bubble of each rank", "activations alive at most")
    named = [("woven" if serial else "step", woven)] + ([("serial", serial)] if serial else [])
    rows = [
        (
            name,
            in_figures(found.step_time),
            f"{found.bubble_share:.1%}",
            _grouped(found.bubble_shares, ".1%"),
            _grouped(found.peak_activations),
        )
        for name, found in named
    ]
    lines: list[Row] = [[(f"simulated with {costs}", "title")]]
    lines += [[(line.text, "title" if number == 0 else "")] for number, line in enumerate(aligned([head, *rows]))]
    if serial:
        gain = 1 - woven.step_time / serial.step_time if serial.step_time else 0.0
        told = f"makes the step {abs(gain):.1%} {'shorter' if gain > 0 else 'longer'}"
        lines.append([(f"weaving the pairs {told if abs(gain) >= 0.0005 else 'does not change the step'}", "")])
    return lines


def comparison_lines(found: Comparison) -> list[Row]:
    """Return the table of a comparison, what was left out and why, and the advice.

    Args:
        found: The comparison.
    """
    from torchweave.reporting.table import aligned

    head = ("schedule", "step", "serial", "gain", "bubble", "activations", "parameters")
    rows = [_candidate_row(candidate) for candidate in found.candidates]
    title = f"{found.num_ranks} ranks, {found.num_microbatches} microbatches; 1/{found.num_ranks} of the model: "
    lines: list[Row] = [[(f"{title}{found.costs}", "title")], []]
    lines += [[(line.text, "title" if number == 0 else "")] for number, line in enumerate(aligned([head, *rows]))]
    lines += [[]] if found.refused else []
    for name, reason in found.refused:
        lines += _wrapped(f"{name}: {reason}", "idle")
    return [*lines, [], *_wrapped(found.advice, "title")]


def _wrapped(text: str, style: str) -> list[Row]:
    return [[(line, style)] for line in textwrap.wrap(text, columns(), subsequent_indent="  ", break_on_hyphens=False)]


def _candidate_row(candidate: Candidate) -> tuple[str, ...]:
    gain = f"{1 - candidate.woven / candidate.serial:.1%}" if candidate.has_pairs and candidate.serial else "-"
    return (
        candidate.name,
        in_figures(candidate.woven),
        in_figures(candidate.serial) if candidate.has_pairs else "-",
        gain,
        f"{candidate.bubble_share:.1%}",
        f"{candidate.activations:g}",
        f"{candidate.parameter_copies}x",
    )


def _grouped(values: Sequence[float], form: str = "") -> str:
    """Return the values of ranks in their order, those that repeat as one with their number; many as from and to."""
    runs = [(value, len(list(run))) for value, run in groupby(format(value, form) for value in values)]
    if len(runs) > _MOST_RUNS:
        return f"{min(values):{form}} to {max(values):{form}}"
    return ", ".join(value if number == 1 else f"{number} x {value}" for value, number in runs)


def plan_record(plan: Plan, costs: Costs | None, woven: Simulation | None, serial: Simulation | None) -> dict[str, Any]:
    """Return a plan and its simulations as what JSON can hold."""
    record: dict[str, Any] = {
        "name": plan.name,
        "num_ranks": plan.num_ranks,
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "placement": plan.placement,
        "peak_activations": peak_activations(plan),
        "ranks": [[str(action) for action in row] for row in plan.ranks],
    }
    if costs is not None and woven is not None:
        record["costs"] = str(costs)
        record["woven"] = _simulation_record(woven)
        record["serial"] = _simulation_record(serial) if serial else None
    return record


def _simulation_record(found: Simulation) -> dict[str, Any]:
    return {
        "step_time": found.step_time,
        "bubble_share": found.bubble_share,
        "bubble_shares": found.bubble_shares,
        "peak_activations": found.peak_activations,
        "ranks": [[(str(span.action), span.begin, span.end) for span in row] for row in found.ranks],
    }


def comparison_record(found: Comparison) -> dict[str, Any]:
    """Return a comparison as what JSON can hold."""
    return {
        "num_ranks": found.num_ranks,
        "num_microbatches": found.num_microbatches,
        "costs": str(found.costs),
        "candidates": [
            {
                "name": candidate.name,
                "step_time_woven": candidate.woven,
                "step_time_serial": candidate.serial,
                "bubble_share": candidate.bubble_share,
                "activations": candidate.activations,
                "parameter_copies": candidate.parameter_copies,
                "has_pairs": candidate.has_pairs,
            }
            for candidate in found.candidates
        ],
        "refused": dict(found.refused),
        "advice": found.advice,
    }


def print_rows(rows: Sequence[Row]) -> None:
    """Print lines of segments: coloured on a terminal, plain elsewhere or where NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        text = plain(rows) if can_print("─·") else plain(rows).translate(_ASCII)
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for row in rows:
        console.print(Text.assemble(*_painted(row)), end="\n")


def _painted(row: Row) -> Iterator[tuple[str, str]]:
    """Yield text and rich's style; the blank behind a cell keeps cells apart, and a bar's line becomes its colour."""
    for text, style in row:
        paint = _STYLES.get(style, "")
        if " on " in paint and text.endswith(" "):
            yield text[:-1].replace("─", " "), paint
            yield " ", ""
        else:
            yield (text.replace("─", " ") if " on " in paint else text), paint
