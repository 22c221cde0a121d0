"""IDEA: what a caller asks of one run through the pipeline, checked before anything is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torchweave.errors import UsageError, described
from torchweave.pipeline.stage import Loss


@dataclass(frozen=True)
class Asked:
    """What a run is asked for.

    Attributes:
        loss_fn: Of the last stage; None for outputs alone.
        reduction: What the loss of a run is: the `mean` of its microbatches' losses, or their `sum`.
        loss_scale: Gradients are those of the loss times this.
        keeps_outputs: Whether the last stage's outputs are kept.
        trains: Whether gradients are computed.

    Raises:
        UsageError: It cannot be.
    """

    loss_fn: Loss | None
    reduction: str
    loss_scale: float
    keeps_outputs: bool
    trains: bool

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise UsageError(
                "reduction is 'mean' or 'sum'", given=repr(self.reduction), remedy="leave it out for the mean"
            )
        if not callable(self.loss_fn) and (self.trains or self.loss_fn is not None):
            raise UsageError("loss_fn can be called", given=described(self.loss_fn), remedy="pass a function")
        scale = self.loss_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
            raise UsageError(
                "loss_scale is a finite number",
                given=described(scale),
                remedy="pass a gradient scaler's get_scale(), or leave it out",
            )

    def seed(self, num_microbatches: int) -> float:
        """Return the gradient with which each microbatch's loss goes backward."""
        return self.loss_scale / num_microbatches if self.reduction == "mean" else self.loss_scale

    def reduced(self, losses: Tensor) -> Tensor | None:
        """Return the loss of the run; None where there is no loss.

        Args:
            losses: Those of the microbatches.
        """
        if self.loss_fn is None:
            return None
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def terms(self) -> dict[str, object]:
        """Return what every rank has to be asked for alike."""
        loss = "none" if self.loss_fn is None else "by a loss_fn"
        return {"loss": loss, "reduction": self.reduction, "loss_scale": self.loss_scale}
