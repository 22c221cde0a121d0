"""IDEA: a simulated plan as a picture for a paper: a row a rank, time to the right, a pair cut into its two halves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from torchweave.schedule.action import PAIR, Action
from torchweave.schedule.costs import in_figures
from torchweave.schedule.plan import Plan
from torchweave.schedule.simulate import Simulation, Span

# Okabe and Ito's colours, which colour-blind people can tell apart; the legend names them too
_COLOURS = {"F": (0, 114, 178), "B": (230, 159, 0), "I": (204, 121, 167), "W": (0, 158, 115)}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_FONT = "font-family='Helvetica,Arial,sans-serif'"
_ROW, _GAP, _TOP, _BETWEEN, _RIGHT = 28, 5, 34, 56, 20
_LEAST, _MOST = 620.0, 2600.0  # pixels of the whole time, where the numbers leave a choice
_DIGIT = 6.2  # pixels of a digit at 10 px
_LIGHTEST = 0.62  # how far the last chunk's colours are mixed with white


@dataclass(frozen=True)
class Panel:
    """One grid of the picture.

    Attributes:
        title: What it shows.
        simulation: The actions in time.
    """

    title: str
    simulation: Simulation


def picture(panels: Sequence[Panel]) -> str:
    """Return an SVG of one or more simulations of the same ranks, on one scale of time.

    Args:
        panels: From top to bottom.
    """
    longest = max(panel.simulation.step_time for panel in panels) or 1.0
    spans = [span for panel in panels for row in panel.simulation.ranks for span in row]
    digits = len(str(panels[0].simulation.plan.num_microbatches - 1))
    lengths = sorted(span.end - span.begin for span in spans if span.end > span.begin) or [1.0]
    short = lengths[len(lengths) // 10]  # a few very short actions do without their numbers
    scale = min(max((digits * _DIGIT + 3) / short * longest, _LEAST), _MOST) / longest
    num_ranks = panels[0].simulation.plan.num_ranks
    left = 24 + _DIGIT * len(f"rank {num_ranks - 1}")
    parts: list[str] = []
    top = float(_TOP)
    for panel in panels:
        parts.extend(_panel(panel, left, top, scale, longest))
        top += num_ranks * (_ROW + _GAP) + _BETWEEN
    parts.extend(_legend(panels[0].simulation.plan, left, top - 14))
    width, height = left + longest * scale + _RIGHT, top + 16
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' role='img' aria-label='{escape(panels[0].title)}'>"
        f"<rect width='100%' height='100%' fill='white'/>{''.join(parts)}</svg>\n"
    )


def _panel(panel: Panel, left: float, top: float, scale: float, longest: float) -> Iterator[str]:
    simulation = panel.simulation
    plan, width = simulation.plan, simulation.step_time * scale
    yield _text(left, top - 12, panel.title, 13, weight="600")
    shapes: dict[str, list[str]] = defaultdict(list)  # fill: outlines; one element a colour keeps the file small
    borders: list[str] = []
    numbers: list[str] = []
    for rank, row in enumerate(simulation.ranks):
        y = top + rank * (_ROW + _GAP)
        yield _text(left - 8, y + _ROW / 2 + 4, f"rank {rank}", 12, anchor="end")
        yield f"<rect x='{left:.1f}' y='{y:.1f}' width='{width:.1f}' height='{_ROW}' fill='#eeeeee'/>"
        for span in row:
            for leaf, x, upper, wide, high in _boxes(span, left, y, scale):
                shapes[_colour(leaf, plan)].append(f"M{x:.1f} {upper:.1f}h{wide:.1f}v{high:.1f}h-{wide:.1f}z")
                if len(str(leaf.microbatch)) * _DIGIT < wide - 1:
                    fill = "#fff" if _is_dark(leaf, plan) else "#222"
                    numbers.append(
                        _text(x + wide / 2, upper + high / 2 + 3.6, str(leaf.microbatch), 10, "middle", fill)
                    )
            if span.action.kind == PAIR:
                wide = (span.end - span.begin) * scale
                borders.append(f"M{left + span.begin * scale:.1f} {y:.1f}h{wide:.1f}v{_ROW}h-{wide:.1f}z")
    for colour, outlines in sorted(shapes.items()):
        yield f"<path d='{''.join(outlines)}' fill='{colour}' stroke='white' stroke-width='0.6'/>"
    yield f"<path d='{''.join(borders)}' fill='none' stroke='#111' stroke-width='1.2'/>"
    yield from numbers
    yield from _axis(left, top + plan.num_ranks * (_ROW + _GAP), scale, simulation.step_time, longest)


def _boxes(span: Span, left: float, y: float, scale: float) -> Iterator[tuple[Action, float, float, float, float]]:
    """Yield each half of an action, or the whole, with x, y, width and height."""
    leaves = span.action.leaves()
    high = _ROW / len(leaves)
    for number, leaf in enumerate(leaves):
        yield leaf, left + span.begin * scale, y + number * high, (span.end - span.begin) * scale, high


def _axis(left: float, y: float, scale: float, end: float, longest: float) -> Iterator[str]:
    """Yield a line with ticks at round times, and the step's end."""
    yield f"<path d='M{left:.1f} {y:.1f}h{end * scale:.1f}' stroke='#888' stroke-width='1'/>"
    step = _round_step(longest / 10)
    ticks = [number * step for number in range(int(end / step) + 1)]
    for time in [*(tick for tick in ticks if end - tick > step * 0.6), end]:
        x = left + time * scale
        yield f"<path d='M{x:.1f} {y:.1f}v4' stroke='#888' stroke-width='1'/>"
        yield _text(x, y + 16, in_figures(time), 10, "middle", "#555")


def _round_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below a number."""
    power = 10.0 ** (len(f"{int(least)}") - 1) if least >= 1 else 10.0 ** -len(f"{1 / least:.0f}")
    return next(step * power for step in (1, 2, 5, 10, 20, 50, 100) if step * power >= least)


def _legend(plan: Plan, left: float, y: float) -> Iterator[str]:
    """Yield a swatch for each kind that the plan has, in the colours of each of its chunks or directions."""
    x = left
    present = {leaf.kind for row in plan.ranks for action in row for leaf in action.leaves()}
    levels = _levels(plan)
    for kind in (kind for kind in _COLOURS if kind in present):
        for level in range(levels):
            yield f"<rect x='{x:.1f}' y='{y:.1f}' width='14' height='14' fill='{_mixed(kind, level, levels)}'/>"
            x += 15
        yield _text(x + 4, y + 11, _NAMES[kind], 12)
        x += 24 + 6.4 * len(_NAMES[kind])
    if any(action.kind == PAIR for row in plan.ranks for action in row):
        yield f"<rect x='{x:.1f}' y='{y:.1f}' width='15' height='14' fill='none' stroke='#111' stroke-width='1.2'/>"
        yield _text(x + 20, y + 11, "pair", 12)
        x += 60
    if levels > 1:
        lighter = "from the last rank" if plan.num_directions > 1 else "later chunk"
        yield _text(x, y + 11, f"lighter: {lighter}", 12, fill="#555")


def _levels(plan: Plan) -> int:
    return plan.num_directions if plan.num_directions > 1 else len(plan.stages_of(0))


def _level(leaf: Action, plan: Plan) -> int:
    if plan.num_directions > 1:
        return plan.direction_of(leaf.microbatch or 0)
    return leaf.stage // plan.num_ranks


def _colour(leaf: Action, plan: Plan) -> str:
    return _mixed(leaf.kind, _level(leaf, plan), _levels(plan))


def _mixed(kind: str, level: int, levels: int) -> str:
    share = _LIGHTEST * level / max(1, levels - 1)
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in _COLOURS[kind])


def _is_dark(leaf: Action, plan: Plan) -> bool:
    return leaf.kind in "FW" and _level(leaf, plan) * 2 < _levels(plan)


def _text(
    x: float, y: float, text: str, size: int, anchor: str = "start", fill: str = "#222", weight: str = "400"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' "
        f"fill='{fill}'>{escape(text)}</text>"
    )
