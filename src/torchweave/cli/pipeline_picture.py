"""`torchweave why --pipeline`: one whole step as it ran, every rank's actions in time, and the bubbles."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torchweave.cli import plan_report as report
from torchweave.diagnose.actions import Ran, ran
from torchweave.diagnose.clocks import meet
from torchweave.errors import UnreadableInputError, UsageError
from torchweave.reporting.output import open_output
from torchweave.reporting.table import aligned
from torchweave.schedule.action import Action
from torchweave.schedule.check import faults_of
from torchweave.schedule.costs import in_figures
from torchweave.schedule.grid import Row, in_time
from torchweave.schedule.plan import placed
from torchweave.schedule.simulate import Simulation, Span, timeline
from torchweave.schedule.svg import Panel, picture
from torchweave.trace.read import read
from torchweave.trace.timeline import Timeline


def show(files: Sequence[Path], *, as_json: bool, svg: Path | None) -> None:
    """Print the last whole step that traces hold.

    Args:
        files: The traces of one pipeline's ranks.
        as_json: JSON instead of text.
        svg: Where the picture goes, None for nowhere.

    Raises:
        UnreadableInputError: A trace cannot be read, or holds no action of a pipeline.
    """
    measured = measured_step([read(file, host_only=True) for file in files])
    predicted = simulated_again(measured)
    if svg is not None:
        panels = [Panel(f"measured: {_head(measured)}", measured)]
        panels += [Panel(f"simulated from its medians: {_head(predicted)}", predicted)] if predicted else []
        with open_output(svg) as file:
            file.write(picture(panels).encode())
        print(f"torchweave: wrote {svg}", file=sys.stderr)
    if as_json:
        print(json.dumps(_record(measured, predicted)))
        return
    rows = report.plan_lines(measured.plan, in_time(measured), report.columns(), report.MOST_LINES)
    report.print_rows([*rows, [], *_lines(measured, predicted)])


def measured_step(timelines: Sequence[Timeline]) -> Simulation:
    """Return the last step of the ranks' traces as spans in ms, on one clock, from the first action's begin.

    Args:
        timelines: One a rank; they are put into the order of their ranks where they know it.
    """
    ordered = sorted(timelines, key=lambda trace: trace.rank if trace.rank is not None else len(timelines))
    found = [ran(trace) for trace in ordered]
    for trace, actions in zip(ordered, found, strict=True):
        if not actions:
            raise UnreadableInputError(
                "A pipeline's trace has annotations such as PP:0F3",
                given=f"{trace.file}, without one",
                remedy="record a step of torchweave.pipeline, or of torch.distributed.pipelining",
            )
    met = meet(ordered) if all(len(trace.work) for trace in ordered) else None
    # without collectives on devices to go by, the ranks' host clocks are taken as one, as they are on one machine
    offsets = met.offset_ns if met is not None and met.num_matched else (0,) * len(ordered)
    zero = min(action.begin_ns + offset for row, offset in zip(found, offsets, strict=True) for action in row)
    ranks = tuple(
        tuple(_span(action, offset - zero) for action in row) for row, offset in zip(found, offsets, strict=True)
    )
    return Simulation(placed("pipeline step", [[span.action for span in row] for row in ranks]), ranks)


def _span(action: Ran, shift_ns: int) -> Span:
    try:
        parsed = Action.parse(action.text)
    except UsageError as error:
        raise UnreadableInputError(error.rule, given=f"PP:{action.text} in a trace", remedy=error.remedy) from error
    return Span(parsed, (action.begin_ns + shift_ns) / 1e6, (action.end_ns + shift_ns) / 1e6)


def simulated_again(measured: Simulation) -> Simulation | None:
    """Return the same plan simulated from the median of each kind of action at each stage; None if it is not whole.

    Args:
        measured: A measured step.
    """
    if faults_of(measured.plan):
        return None
    medians = _medians(measured)
    spans = timeline(measured.plan, lambda action: medians[_kind(action)])
    return Simulation(measured.plan, spans)


def _medians(measured: Simulation) -> dict[str, float]:
    lengths: dict[str, list[float]] = {}
    for row in measured.ranks:
        for span in row:
            lengths.setdefault(_kind(span.action), []).append(span.end - span.begin)
    return {kind: median(found) for kind, found in lengths.items()}


def _kind(action: Action) -> str:
    """Return kind and stage of an action, of both halves of a pair."""
    return ";".join(f"{leaf.stage}{leaf.kind}" for leaf in action.leaves())


def _head(found: Simulation) -> str:
    return f"step {in_figures(found.step_time)} ms, bubble {found.bubble_share:.1%}"


def _lines(measured: Simulation, predicted: Simulation | None) -> list[Row]:
    """Return the table of the ranks, the medians, and how well the simulation tells the step."""
    head = ("rank", "busy ms", "bubble", "activations")
    ranks = zip(measured.busy, measured.bubble_shares, measured.peak_activations, strict=True)
    rows = [(str(rank), in_figures(busy), f"{share:.1%}", str(peak)) for rank, (busy, share, peak) in enumerate(ranks)]
    lines: list[Row] = [[(f"measured: {_head(measured)}", "title")]]
    lines += [[(line.text, "title" if number == 0 else "")] for number, line in enumerate(aligned([head, *rows]))]
    medians = "  ".join(
        f"{kind}:\N{NO-BREAK SPACE}{in_figures(time)}" for kind, time in sorted(_medians(measured).items())
    )
    lines += [[], [("median ms of each kind of action at each stage", "title")]]
    lines += [
        [(line, "")] for line in textwrap.wrap(medians, report.columns(), initial_indent="  ", subsequent_indent="  ")
    ]
    if predicted is None:
        return [*lines, [("not simulated: actions of some ranks or microbatches are not in these traces", "idle")]]
    off = predicted.step_time / measured.step_time - 1 if measured.step_time else 0.0
    said = f"simulated from these medians, without transfers: {in_figures(predicted.step_time)} ms ({off:+.1%})"
    return [*lines, [(said, "")]]


def _record(measured: Simulation, predicted: Simulation | None) -> dict[str, Any]:
    return {
        "step_ms": measured.step_time,
        "bubble_share": measured.bubble_share,
        "bubble_shares": measured.bubble_shares,
        "busy_ms": measured.busy,
        "peak_activations": measured.peak_activations,
        "median_ms": _medians(measured),
        "simulated_step_ms": predicted.step_time if predicted else None,
        "ranks": [[(str(span.action), span.begin, span.end) for span in row] for row in measured.ranks],
    }
