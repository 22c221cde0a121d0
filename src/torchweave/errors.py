"""The errors that torchweave raises: each names the rule, what was given, and the remedy.

Each carries its data as attributes, so that a program can act on it without reading the text.
"""

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


def described(value: object) -> str:
    """Describe what was given, in one short line, for an error's `given`.

    Args:
        value: Anything; a tensor is described by its shape, and never by its numbers.
    """
    shape = getattr(value, "shape", None)
    if type(value).__name__ in ("Tensor", "Parameter", "ndarray") and shape is not None:
        return f"a tensor of shape {tuple(shape)}"
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    if "tensor(" in text:  # numbers of a tensor inside
        return f"{type(value).__name__} with a tensor inside"
    return f"{type(value).__name__}: {text[:80]}"


class UsageError(TorchweaveError, ValueError):
    """An argument, option or setting is not what is allowed (exit code 2)."""


class UnreadableInputError(TorchweaveError):
    """A file cannot be read as what it should be (exit code 3)."""


class NotWeavableError(TorchweaveError):
    """This pair cannot be woven by the strategy that was asked for without changing its result."""


class DeviationError(TorchweaveError):
    """A strand met another crossing than the record of its first run says; nothing was sent.

    Attributes:
        rank: Global rank.
        strand: `forward` or `backward`.
        crossing: Number of the step in the strand, from 0.
        expected: The recorded step.
        met: The step that came instead.
        line: `file:line` of the user's code.
    """

    def __init__(self, *, rank: int, strand: str, crossing: int, expected: str, met: str, line: str) -> None:
        self.rank, self.strand, self.crossing = rank, strand, crossing
        self.expected, self.met, self.line = expected, met, line
        super().__init__(
            f"A strand has to meet the same crossings in every pair of a kind; rank {rank}, {strand} strand, "
            f"step {crossing} at {line} deviates",
            given=f"{met}, where the record of the first pair has {expected}",
            remedy="give pairs that communicate differently different names, weave(..., kind=...), or use "
            "strategy='serial' for a pair whose communication depends on its data",
        )


class BrokenGroupError(TorchweaveError):
    """Ranks of a process group are out of step, so that it must not be used any more.

    Attributes:
        channel: The group, or the point-to-point channel.
        cause: What happened, on which rank.
    """

    def __init__(self, channel: str, cause: str) -> None:
        self.channel, self.cause = channel, cause
        super().__init__(
            f"All ranks of a process group have to stay in step; group {channel!r} is broken",
            given=cause,
            remedy="mend the failure of that rank, then destroy the process group and make it again "
            "(or restart the job)",
        )


class WaitLimitError(TorchweaveError):
    """Something was waited for longer than its limit.

    Attributes:
        waiter: Who waited.
        awaited: For whom or what.
        limit_s: The limit, seconds.
    """

    def __init__(self, waiter: str, awaited: str, limit_s: float, *, remedy: str = "") -> None:
        self.waiter, self.awaited, self.limit_s = waiter, awaited, limit_s
        super().__init__(
            f"Every wait has a limit, the process group's timeout; {waiter} waited {limit_s:g} s for {awaited}",
            remedy=remedy or "find out what holds it up, or give the process group a longer timeout",
        )


class PipelineError(TorchweaveError):
    """A rank of a pipeline could not go on; raised on every rank of the pipeline.

    Attributes:
        rank: Global rank that failed.
        stage: The stage that it ran or was to run; None outside of the schedule's actions.
        action: The action as the plan writes it, such as `1F3`, or what the rank did outside of them.
        microbatch: The microbatch, or None.
        cause: What happened there.
    """

    def __init__(self, *, rank: int, stage: int | None, action: str, microbatch: int | None, cause: str) -> None:
        self.rank, self.stage, self.action, self.microbatch, self.cause = rank, stage, action, microbatch, cause
        where = f"rank {rank}" + ("" if stage is None else f", stage {stage}") + f", action {action}"
        where += "" if microbatch is None else f", microbatch {microbatch}"
        super().__init__(
            f"Every rank of a pipeline runs its actions to their end; {where} did not",
            given=cause,
            remedy="mend the failure of that rank, and build the pipeline again (its connections are closed)",
        )
