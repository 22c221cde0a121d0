"""IDEA: a plan as a grid of characters, a row a rank: cells first, then cut into blocks that fit the width."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchweave.schedule.action import P2P, PAIR, Action
from torchweave.schedule.costs import in_figures
from torchweave.schedule.plan import Plan
from torchweave.schedule.simulate import Simulation, Span, timeline

if TYPE_CHECKING:
    from torchweave.schedule.check import Fault

Segment = tuple[str, str]  # text, and its style: a kind of action, `idle`, `head`, `rank`, `wrong`, or nothing
Row = list[Segment]

# so that one very short action's label does not stretch the whole step: characters of the average action at most
_MOST_PER_ACTION = 16
_MOST_FAULTS = 20
_AROUND = 3  # actions that are shown on each side of a fault


@dataclass(frozen=True)
class Cell:
    """A stretch of a rank's row.

    Attributes:
        begin: The first column, in characters.
        width: How many columns.
        texts: What to write there, the best first; the first that fits is taken.
        fill: The character that fills what is left of it.
        style: See `Segment`.
    """

    begin: int
    width: int
    texts: tuple[str, ...]
    fill: str
    style: str

    @property
    def end(self) -> int:
        """The column behind it."""
        return self.begin + self.width

    def between(self, begin: int, end: int) -> str:
        """Return the characters from one column to another; a text that is cut goes where it fits."""
        first, last = max(begin, self.begin), min(end, self.end)
        if first >= last:
            return ""
        room = last - first - (last == self.end)
        before = max(0, first - self.begin)  # columns of it that stand in an earlier block
        text = next((text for text in self.texts if before < len(text) <= room), "")
        return (text + self.fill * room)[:room] + " " * (last == self.end)


@dataclass(frozen=True)
class Grid:
    """Where the actions of all ranks stand; cells are made only of what is drawn.

    Attributes:
        ranks: For each rank its actions in time.
        per_unit: Columns for a unit of time.
        in_slots: Whether a unit is a slot, one for each action; else an action is as wide as it is long.
    """

    ranks: tuple[tuple[Span, ...], ...]
    per_unit: float
    in_slots: bool

    @property
    def step(self) -> int:
        """Blocks begin at a multiple of so many columns."""
        return round(self.per_unit) if self.in_slots else 1

    @property
    def width(self) -> int:
        """Columns of the whole grid."""
        return max((self._column(row[-1].end) for row in self.ranks if row), default=0)

    def cells(self, rank: int, begin: int, end: int) -> Iterator[Cell]:
        """Yield the cells of a rank that lie between two columns, or reach into them."""
        row = self.ranks[rank]
        first = bisect_right(row, begin, key=lambda span: self._column(span.end))
        for place in range(first, len(row)):
            left = self._column(row[place - 1].end) if place else 0
            cell = self._cell(row[place])
            if cell.begin > left:
                yield from self._idle(left, cell.begin)
            if cell.begin >= end:
                return
            yield cell

    def _column(self, time: float) -> int:
        return round(time * self.per_unit)

    def _cell(self, span: Span) -> Cell:
        begin, end, action = self._column(span.begin), self._column(span.end), span.action
        if self.in_slots:
            return Cell(begin, end - begin, (label(action),), " ", style_of(action))
        short = ";".join(f"{leaf.kind}{leaf.microbatch}" for leaf in action.leaves())
        return Cell(begin, end - begin, (label(action), short), "─", style_of(action))

    def _idle(self, begin: int, end: int) -> Iterator[Cell]:
        if not self.in_slots:
            yield Cell(begin, end - begin, (), "·", "idle")
            return
        for column in range(begin, end, self.step):
            yield Cell(column, self.step, ("·",), " ", "idle")


def slots(plan: Plan) -> Grid:
    """Return the grid in which every action takes one slot, and a rank that waits shows a dot.

    Args:
        plan: A valid plan of computing actions.
    """
    has_pairs = any(action.parts for row in plan.ranks for action in row)
    return Grid(timeline(plan, lambda _: 1.0), 1 + _longest(plan, has_pairs), in_slots=True)


def in_time(found: Simulation) -> Grid:
    """Return the grid in which an action is as wide as it is long, wide enough for most labels.

    Args:
        found: The simulation.
    """
    shortest: dict[bool, float] = {}
    total, number = 0.0, 0
    for row in found.ranks:
        for span in row:
            length, is_pair = span.end - span.begin, bool(span.action.parts)
            if length > 0:
                total, number = total + length, number + 1
                shortest[is_pair] = min(length, shortest.get(is_pair, length))
    needed = max(((1 + _longest(found.plan, pair)) / length for pair, length in shortest.items()), default=1.0)
    return Grid(found.ranks, min(needed, _MOST_PER_ACTION * number / total if total else 1.0), in_slots=False)


def _longest(plan: Plan, is_pair: bool) -> int:
    """Return the characters of the longest label."""
    single = len(f"{plan.num_stages - 1}F{plan.num_microbatches - 1}")
    return 2 * single + 1 if is_pair else single


def label(action: Action) -> str:
    """Return an action in the fewest characters that are not ambiguous: a pair without its kind."""
    return ";".join(map(str, action.parts)) if action.parts else str(action)


def style_of(action: Action) -> str:
    """Return the style of an action: its kind, `pair` or `other`."""
    if action.kind == PAIR:
        return "pair"
    return action.kind if action.kind in "FBIW" else "p2p" if action.kind in P2P else "other"


def draw(grid: Grid, width: int, max_lines: int | None = None) -> list[Row]:
    """Return the lines of a grid, in blocks below each other that fit the width.

    Args:
        grid: The cells.
        width: Columns of the terminal.
        max_lines: About how many lines at most; more are cut from the middle, and a line says so. None for all.
    """
    left = len(f"rank {len(grid.ranks) - 1}") + 2
    most = max(1, (width - left) // grid.step)  # steps in a block
    steps = -(-grid.width // grid.step)
    block = max(1, -(-steps // max(1, -(-steps // most)))) * grid.step
    begins = list(range(0, max(1, grid.width), block))
    kept = len(begins) if max_lines is None else max(2, max_lines // (len(grid.ranks) + 2))
    head = begins if len(begins) <= kept else begins[: kept - 1]
    lines: list[Row] = []
    for begin in head:
        lines += _block(grid, begin, begin + block, left)
    if len(head) < len(begins):
        last = max(begins[len(head)], steps * grid.step - block)
        cut = f"... {_said(grid, begins[len(head)], last)} left out ..."
        lines += [[(cut, "head")], [], *_block(grid, last, last + block, left)]
    return lines[:-1]


def _block(grid: Grid, begin: int, end: int, left: int) -> list[Row]:
    """Return one block: its head, a line for each rank, and an empty line."""
    lines: list[Row] = [[(" " * left + _said(grid, begin, min(end, grid.width)), "head")]]
    for rank in range(len(grid.ranks)):
        line: Row = [(f"rank {rank}".ljust(left), "rank")]
        line += [(part, cell.style) for cell in grid.cells(rank, begin, end) if (part := cell.between(begin, end))]
        lines.append(line)
    return [*lines, []]


def _said(grid: Grid, begin: int, end: int) -> str:
    """Say which part of the grid two columns bound."""
    if grid.in_slots:
        return f"slots {begin // grid.step} to {-(-end // grid.step) - 1} of {-(-grid.width // grid.step)}"
    whole = max((row[-1].end for row in grid.ranks if row), default=0.0)
    first, last = (min(column / grid.per_unit, whole) if column < grid.width else whole for column in (begin, end))
    return f"time {in_figures(first)} to {in_figures(last)} of {in_figures(whole)}"


def plain(lines: Sequence[Row]) -> str:
    """Return lines as text without styles."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def marked(plan: Plan, faults: Sequence[Fault]) -> str:
    """Return each fault with its rank's row around it, the wrong cell between `>` and `<`.

    Args:
        plan: A plan with faults.
        faults: What `torchweave.schedule.check.faults_of` returned.
    """
    lines = []
    for fault in faults[:_MOST_FAULTS]:
        row = plan.ranks[fault.rank]
        if fault.place is None:
            lines.append(f"rank {fault.rank}: {fault.text}")
            continue
        lines.append(f"rank {fault.rank}, action {fault.place + 1}: {fault.text}")
        first, last = max(0, fault.place - _AROUND), min(len(row), fault.place + _AROUND + 1)
        around = [f">{row[i]}<" if i == fault.place else str(row[i]) for i in range(first, last)]
        lines.append("    " + " ".join(["..."] * (first > 0) + around + ["..."] * (last < len(row))))
    if len(faults) > _MOST_FAULTS:
        lines.append(f"and {len(faults) - _MOST_FAULTS} more")
    return "\n".join(lines)
