"""IDEA: a plan as a grid of characters, a row a rank: cells first, then cut into blocks that fit the width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchweave.schedule.action import P2P, PAIR, Action
from torchweave.schedule.plan import Plan
from torchweave.schedule.simulate import Span, timeline

if TYPE_CHECKING:
    from torchweave.schedule.check import Fault

Segment = tuple[str, str]  # text, and its style: a kind of action, `idle`, `head`, `rank`, `wrong`, or nothing
Row = list[Segment]

# an action's label is never cut off in favour of a step that fits fewer lines, up to so many characters for a unit
_MOST_PER_UNIT = 16
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
    """The cells of all ranks.

    Attributes:
        rows: For each rank its cells, by column.
        step: Blocks begin at a multiple of so many columns.
        unit: What `step` columns are called.
        per_unit: Columns for one slot, or for one unit of time.
    """

    rows: tuple[tuple[Cell, ...], ...]
    step: int
    unit: str
    per_unit: float

    @property
    def width(self) -> int:
        """Columns of the whole grid."""
        return max((row[-1].end for row in self.rows if row), default=0)


def slots(plan: Plan) -> Grid:
    """Return the grid in which every action takes one slot, and a rank that waits shows a dot.

    Args:
        plan: A valid plan of computing actions.
    """
    spans = timeline(plan, lambda _: 1.0)
    wide = 1 + max((len(label(span.action)) for row in spans for span in row), default=0)
    rows = []
    for row in spans:
        cells: list[Cell] = []
        for span in row:
            slot = int(span.begin)
            cells += [Cell(idle * wide, wide, ("·",), " ", "idle") for idle in range(len(cells), slot)]
            cells.append(Cell(slot * wide, wide, (label(span.action),), " ", style_of(span.action)))
        rows.append(tuple(cells))
    return Grid(tuple(rows), wide, "slot", wide)


def in_time(ranks: Sequence[Sequence[Span]]) -> Grid:
    """Return the grid in which an action is as wide as it is long.

    Args:
        ranks: For each rank its actions in time.
    """
    spans = [span for row in ranks for span in row if span.end > span.begin]
    needed = max(((len(label(span.action)) + 1) / (span.end - span.begin) for span in spans), default=1.0)
    typical = sorted(span.end - span.begin for span in spans)[len(spans) // 2] if spans else 1.0
    per_unit = min(needed, _MOST_PER_UNIT / typical)
    rows = []
    for row in ranks:
        cells: list[Cell] = []
        for span in row:
            begin, end = round(span.begin * per_unit), round(span.end * per_unit)
            idle = begin - (cells[-1].end if cells else 0)
            if idle > 0:
                cells.append(Cell(begin - idle, idle, ("",), "·", "idle"))
            if end > begin:
                short = ";".join(f"{leaf.kind}{leaf.microbatch}" for leaf in span.action.leaves())
                cells.append(Cell(begin, end - begin, (label(span.action), short), "─", style_of(span.action)))
        rows.append(tuple(cells))
    return Grid(tuple(rows), 1, "time", per_unit)


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
    left = len(f"rank {len(grid.rows) - 1}") + 2
    most = max(1, (width - left) // grid.step)  # steps in a block
    steps = -(-grid.width // grid.step)
    block = -(-steps // max(1, -(-steps // most))) * grid.step
    begins = list(range(0, grid.width, block))
    kept = len(begins) if max_lines is None else max(2, max_lines // (len(grid.rows) + 2))
    head = begins if len(begins) <= kept else begins[: kept - 1]
    lines: list[Row] = []
    for begin in head:
        lines += _block(grid, begin, begin + block, left)
    if len(head) < len(begins):
        cut = f"... {_said(grid, head[-1] + block, begins[-1])} left out ..."
        lines += [[(cut, "head")], [], *_block(grid, begins[-1], begins[-1] + block, left)]
    return lines[:-1]


def _block(grid: Grid, begin: int, end: int, left: int) -> list[Row]:
    """Return one block: its head, a line for each rank, and an empty line."""
    lines: list[Row] = [[(" " * left + _said(grid, begin, min(end, grid.width)), "head")]]
    for rank, row in enumerate(grid.rows):
        line: Row = [(f"rank {rank}".ljust(left), "rank")]
        for cell in row:
            if part := cell.between(begin, end):
                line.append((part, cell.style))
        lines.append(line)
    return [*lines, []]


def _said(grid: Grid, begin: int, end: int) -> str:
    """Say which part of the grid two columns bound."""
    if grid.unit == "slot":
        return f"slots {begin // grid.step} to {-(-end // grid.step) - 1} of {-(-grid.width // grid.step)}"
    first, last, whole = (f"{column / grid.per_unit:.4g}" for column in (begin, end, grid.width))
    return f"time {first} to {last} of {whole}"


def plain(lines: Sequence[Row], replaced: Callable[[str], str] = str) -> str:
    """Return lines as text.

    Args:
        lines: The lines.
        replaced: What to do with each line, such as replacing characters that cannot be printed.
    """
    return "".join(replaced("".join(text for text, _ in line)).rstrip() + "\n" for line in lines)


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
