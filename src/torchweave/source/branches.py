"""IDEA: what a test says of the branch behind it: whether that runs on the CPU alone."""

from __future__ import annotations

import ast
import re

from torchweave.source.expressions import text_of

_DEVICE = re.compile(r"cuda|gpu", re.IGNORECASE)
_HOST = re.compile(r"(^|[._])(cpu|use_cpu|on_cpu|is_cpu)(_only)?(\(\))?$", re.IGNORECASE)


def is_without_cuda(test: ast.expr, *, taken: bool) -> bool:
    """Return whether a branch runs only where no CUDA device is used.

    Args:
        test: The test of an `if`.
        taken: Whether it is the branch behind a test that holds; else the other one.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_without_cuda(test.operand, taken=not taken)
    if isinstance(test, ast.BoolOp):
        parts = [is_without_cuda(one, taken=taken) for one in test.values]
        # all parts of an `and` hold behind it, all parts of an `or` fail in its other branch
        return any(parts) if isinstance(test.op, ast.And) == taken else all(parts)
    if isinstance(test, ast.Compare):
        return _of_comparison(test, taken=taken)
    text = text_of(test)
    given = test.args[0] if isinstance(test, ast.Call) and test.args else None
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        text += f" {given.value}"  # device.startswith("cuda")
    if _HOST.search(text):
        return taken
    return _DEVICE.search(text) is not None and not taken


def _of_comparison(test: ast.Compare, *, taken: bool) -> bool:
    words = [one.value for one in (test.left, *test.comparators) if isinstance(one, ast.Constant)]
    named = [word for word in words if isinstance(word, str) and word.partition(":")[0] in ("cpu", "cuda", "gpu")]
    if len(test.ops) != 1 or len(named) != 1:
        return False
    same = isinstance(test.ops[0], (ast.Eq, ast.Is, ast.In))
    if not same and not isinstance(test.ops[0], (ast.NotEq, ast.IsNot, ast.NotIn)):
        return False
    return (named[0] == "cpu") == (same == taken)
