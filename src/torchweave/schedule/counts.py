"""IDEA: numbers of ranks, microbatches and chunks are whole and above 0, wherever they come from."""

from __future__ import annotations

from numbers import Integral

from torchweave.errors import UsageError, described


def check_count(what: str, number: object) -> None:
    """Raise where a number of something cannot be one.

    Args:
        what: Of what, such as `ranks`.
        number: What was given.

    Raises:
        UsageError: It is no whole number above 0.
    """
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise UsageError(
            f"A pipeline has a whole number of {what}", given=described(number), remedy="pass an int above 0"
        )
    if number < 1:
        raise UsageError(f"A pipeline has at least 1 of its {what}", given=str(number), remedy=f"give more {what}")
