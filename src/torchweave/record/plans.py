"""What an operator does, as its schema and tags tell: which memory it touches, and for whom it waits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from torchweave.record.writer import Writer
from torchweave.trace.log import WRITTEN

# these make memory and leave it as it is
_NO_WRITE = re.compile(r"^aten::(?:new_)?empty(?:_like|_strided|_permuted|_quantized)?$")
# and these change only what a tensor says of itself
_NO_ACCESS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::lift_fresh",
        "aten::record_stream",
        "aten::resize_",
        "aten::set_",
        "_c10d_functional::_wrap_tensor_autograd",
    }
)
# the host reads what these find out: torch's tags for that, and one that lacks them
_READ = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_READ_TOO = "aten::equal"
_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})
_WAIT = "_c10d_functional::wait_tensor"


class Does(Enum):
    """What an operator does beside reading and writing memory."""

    NOTHING = auto()
    KEEP = auto()  # `record_stream`
    COPY = auto()  # to or from another device, or the host
    READ = auto()  # the host waits for it
    MASK = auto()  # as READ, if an index is a mask
    COLLECT = auto()  # a collective
    COLLECT_APART = auto()  # one for which WAIT waits
    WAIT = auto()  # for a collective


@dataclass(frozen=True, slots=True)
class Plan:
    """What to look at of an operator, from its schema.

    Attributes:
        name: Row of its name.
        arguments: Position, name and flags of each argument whose memory it touches.
        makes: Whether its results may be new memory.
        writes: Whether its results are memory that it wrote.
        does: What else it does.
        option: Position and name of the argument that says whether anybody waits for it, None for none.
    """

    name: int
    arguments: tuple[tuple[int, str, int], ...] = ()
    makes: bool = False
    writes: bool = False
    does: Does = Does.NOTHING
    option: tuple[int, str] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look at."""
        return not (self.arguments or self.makes or self.does is not Does.NOTHING)


def plan_of(func: Any, writer: Writer) -> Plan | None:
    """Return what to look at of an operator; None for what is no plain operator.

    Args:
        func: The operator.
        writer: Numbers names.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return None
    schema = func._schema
    name = writer.name(schema.name)
    if schema.name in _NO_ACCESS:
        return Plan(name, does=Does.KEEP if schema.name == "aten::record_stream" else Does.NOTHING)
    arguments = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        # an alias that is not written is a view's: nothing is read yet
        if "Tensor" in str(argument.type) and (alias is None or alias.is_write):
            arguments.append((position, argument.name, WRITTEN if alias is not None else 0))
    fresh = any("Tensor" in str(value.type) and value.alias_info is None for value in schema.returns)
    views = any(argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments)
    if views:
        return Plan(name)
    if _NO_WRITE.match(schema.name):
        # it takes a shape only
        return Plan(name, makes=True)
    does = _does(func)
    options = [(at, each.name) for at, each in enumerate(schema.arguments) if each.name in ("async_op", "non_blocking")]
    return Plan(name, tuple(arguments), fresh, fresh, does, options[0] if options else None)


def _does(func: Any) -> Does:
    name = func._schema.name
    if name == _WAIT:
        return Does.WAIT
    if name.startswith("c10d::"):
        return Does.COLLECT
    if name.startswith("_c10d_functional::"):
        return Does.COLLECT_APART
    if name in _COPIES:
        return Does.COPY
    if name == "aten::index":
        return Does.MASK
    return Does.READ if name == _READ_TOO or _READ.intersection(func.tags) else Does.NOTHING
