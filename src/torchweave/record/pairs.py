"""Which reads of a clock the program subtracts from each other: only those two are a measurement.

The log knows on which lines clocks were read; the source says which of these values meet in a subtraction.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping


def measured_pairs(source: str, lines: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return pairs of reads, the earlier first, whose values the program subtracts.

    Args:
        source: A file's text; what is no Python has no pairs.
        lines: For each line on which a clock was read, what stands for it in the result.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    assigned: dict[str, set[int]] = {}
    for node in ast.walk(tree):
        for target, value in _assignments(node):
            read = _reads(value, lines)
            if read:
                assigned.setdefault(ast.unparse(target), set()).update(read)
    pairs: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            later = _reads(node.left, lines) or assigned.get(ast.unparse(node.left), set())
            earlier = _reads(node.right, lines) or assigned.get(ast.unparse(node.right), set())
            pairs |= {(lines[first], lines[second]) for first in earlier for second in later}
    return sorted(pairs)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value


def _reads(value: ast.AST, lines: Mapping[int, int]) -> set[int]:
    """Return the lines of an expression's calls on which a clock was read."""
    return {node.lineno for node in ast.walk(value) if isinstance(node, ast.Call) and node.lineno in lines}
