"""IDEA: what an action costs: computation, the communication inside it, and what weaving a pair recovers of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torchweave.errors import UsageError
from torchweave.schedule.action import BACKWARD, FORWARD, INPUT, PAIR, WEIGHT, Action

Times = float | tuple[float, ...]

_LEAST, _MOST = 1e-100, 1e100


@dataclass(frozen=True)
class Costs:
    """What actions cost, in any one unit of time; each is one number, or one for each stage.

    An F, B or I that runs alone takes its computation and its communication, one after the other, since what follows
    a collective needs its result. A W has no communication. A pair takes, with C the computation and M the
    communication of both its halves, `C + M - recovered * (C + M - max(C, M))`.

    Attributes:
        F: Computation of a stage's forward for one microbatch.
        B: Computation of its whole backward; None for 2 F.
        W: Computation of its weight gradients alone; None for B / 2.
        I: Computation of its input gradients alone; None for B - W.
        comm: Communication inside an F (dispatch and combine, tensor parallelism), and inside a B or an I.
        comm_backward: Communication inside a B or an I, where it is not `comm` (recomputation communicates again).
        p2p: How long a result takes to another rank, from when it is there and its receive has begun; ranks go on
            meanwhile.
        recovered: The recovered share of a woven pair: 0 serial, 1 the bound. `torchweave demo` measures it.
    """

    F: Times = 1.0
    B: Times | None = None
    W: Times | None = None
    I: Times | None = None  # noqa: E741 (the field's name for it)
    comm: Times = 0.0
    comm_backward: Times | None = None
    p2p: float = 0.0
    recovered: float = 1.0

    def __post_init__(self) -> None:
        for name in ("p2p", "recovered"):
            if isinstance(getattr(self, name), tuple):
                raise UsageError(
                    f"{name} is one number, for all stages", given=str(getattr(self, name)), remedy="give one"
                )
        for field in fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                if not (number == 0 or _LEAST <= number <= _MOST):  # sums and ratios of these are finite
                    raise UsageError(
                        f"A cost is 0, or between {_LEAST:g} and {_MOST:g}",
                        given=f"{field.name}={number:g}",
                        remedy="give all costs in one unit, such as ms",
                    )
        if self.recovered > 1:
            raise UsageError(
                "A recovered share is at most 1, the bound", given=f"recovered={self.recovered:g}", remedy="recovered=1"
            )

    @staticmethod
    def parse(text: str) -> Costs:
        """Read costs as the command line has them.

        Args:
            text: Such as `F=1,B=2,comm=0.5` or `F=1/1/1/1.5` with a number for each stage; may be empty.

        Raises:
            UsageError: It is not written so, or a cost cannot be.
        """
        names = [field.name for field in fields(Costs)]
        values: dict[str, Times] = {}
        for part in filter(None, text.split(",")):
            name, equals, numbers = (word.strip() for word in part.partition("="))
            try:
                value = tuple(float(number) for number in numbers.split("/"))
            except ValueError:
                value = ()
            if name not in names or name in values or not equals or not value:
                raise UsageError(
                    f"Costs are NAME=NUMBER with commas between, each once; a name is one of {', '.join(names)}",
                    given=repr(part),
                    remedy="write F=1,B=2,W=1,comm=0.5, or F=1/1/1/1.5 for a number for each stage",
                )
            values[name] = value if len(value) > 1 else value[0]
        made: dict[str, Any] = values  # what belongs to no stage is refused there if it is a list
        return Costs(**made)

    def __str__(self) -> str:
        filled = self._filled()
        shown = {field.name: filled.get(field.name, getattr(self, field.name)) for field in fields(self)}
        if not self.p2p:
            del shown["p2p"]
        if shown["comm_backward"] in (None, shown["comm"]):
            del shown["comm_backward"]
        if self.I is None:
            del shown["I"]
        return " ".join(f"{name}={_written(value)}" for name, value in shown.items() if value is not None)

    def scaled(self, factor: float) -> Costs:
        """Return the costs of stages that are so many times as long; `p2p` and `recovered` stay.

        Args:
            factor: 0.5 for stages half as long.

        Raises:
            UsageError: A cost is given for each stage, and so belongs to one number of stages.
        """
        lists = [field.name for field in fields(self) if isinstance(getattr(self, field.name), tuple)]
        if lists:
            raise UsageError(
                "Only a cost that is one number holds for schedules of different numbers of stages",
                given=f"a list for {', '.join(lists)}",
                remedy="give one number, the average",
            )
        times = ("F", "B", "W", "I", "comm", "comm_backward")
        known = {name: getattr(self, name) for name in times if getattr(self, name) is not None}
        return replace(self, **{name: value * factor for name, value in known.items()})

    def table(self, num_stages: int) -> CostTable:
        """Return the costs of each stage.

        Args:
            num_stages: Stages of the plan.

        Raises:
            UsageError: The numbers are not one for each stage, or a W is longer than its B.
        """
        columns = {name: _column(name, value, num_stages) for name, value in self._filled().items()}
        if self.I is None and min(columns["I"]) < 0:
            raise UsageError(
                "B is the whole backward, and W a part of it",
                given=str(self),
                remedy="give I too, if a split backward is that much slower",
            )
        both, none = columns["comm_backward"], [0.0] * num_stages
        return CostTable(
            {FORWARD: columns["F"], BACKWARD: columns["B"], INPUT: columns["I"], WEIGHT: columns["W"]},
            {FORWARD: columns["comm"], BACKWARD: both, INPUT: both, WEIGHT: none},
            self.recovered,
        )

    def _filled(self) -> dict[str, Times]:
        """Return the costs of stages by name, with what was not given made of what was."""
        whole = self.B if self.B is not None else _each(lambda f: 2 * f, self.F)
        weight = self.W if self.W is not None else _each(lambda b: b / 2, whole)
        inputs = self.I if self.I is not None else _each(lambda b, w: b - w, whole, weight)
        backward = self.comm_backward if self.comm_backward is not None else self.comm
        return {"F": self.F, "B": whole, "I": inputs, "W": weight, "comm": self.comm, "comm_backward": backward}


def _each(function: Callable[..., float], *values: Times) -> Times:
    """Apply a function to numbers, or stage by stage where one of them is a list; the others are repeated."""
    lengths = [len(value) for value in values if isinstance(value, tuple)]
    if not lengths:
        return function(*values)
    columns = [value if isinstance(value, tuple) else (value,) * min(lengths) for value in values]
    return tuple(function(*row) for row in zip(*columns, strict=False))  # unequal lengths are refused by the table


def _column(name: str, value: Times, num_stages: int) -> list[float]:
    """Return one number for each stage."""
    if not isinstance(value, tuple):
        return [value] * num_stages
    if len(value) != num_stages:
        raise UsageError(
            f"A cost is one number, or one for each of the {num_stages} stages",
            given=f"{len(value)} numbers for {name}",
            remedy=f"give {num_stages} numbers or one",
        )
    return list(value)


def _written(value: Times) -> str:
    return "/".join(f"{number:g}" for number in (value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True)
class CostTable:
    """The costs of a plan's stages.

    Attributes:
        compute: For each of F, B, I, W, for each stage, the computation.
        comm: The same for the communication inside.
        recovered: The recovered share of a woven pair.
    """

    compute: dict[str, list[float]]
    comm: dict[str, list[float]]
    recovered: float

    def of(self, action: Action) -> float:
        """Return how long a computing action takes."""
        kind, stage = action.kind, action.stage
        if kind != PAIR:
            return self.compute[kind][stage] + self.comm[kind][stage]
        compute, comm = self._sum(self.compute, action.parts), self._sum(self.comm, action.parts)
        return compute + comm - self.recovered * (compute + comm - max(compute, comm))

    @staticmethod
    def _sum(table: dict[str, list[float]], parts: Sequence[Action]) -> float:
        return sum(table[part.kind][part.stage] for part in parts)


def in_figures(time: float) -> str:
    """Return a time in four figures, or whole where it is longer and a person can still read it.

    Args:
        time: In the unit of the costs.
    """
    return f"{time:.0f}" if 1e4 <= time < 1e15 else f"{time:.4g}"
