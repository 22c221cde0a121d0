"""The errors that torchweave raises: each names the rule, what was given, and the remedy, and carries its data."""

from __future__ import annotations


class TorchweaveError(Exception):
    """Any error that torchweave itself raises.

    Args:
        rule: What must hold, as one sentence without its full stop.
        given: What was found instead.
        remedy: What to do about it.
    """

    def __init__(self, rule: str, *, given: str = "", remedy: str = "") -> None:
        self.rule, self.given, self.remedy = rule, given, remedy
        parts = [rule.rstrip(".") + "."]
        if given:
            parts.append(f"Given: {given.rstrip('.')}.")
        if remedy:
            parts.append(f"Remedy: {remedy.rstrip('.')}.")
        super().__init__(" ".join(parts))


class UsageError(TorchweaveError, ValueError):
    """An argument, option or setting is not what is allowed (exit code 2)."""


class UnreadableInputError(TorchweaveError):
    """A file cannot be read as what it should be (exit code 3)."""
