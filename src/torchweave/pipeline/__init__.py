"""IDEA: run a plan on `torch.distributed`, over NCCL or gloo; a pair in the plan goes to weave."""

from torchweave.pipeline.make import build
from torchweave.pipeline.places import stages_of
from torchweave.pipeline.steps import Pipeline

__all__ = ["Pipeline", "build", "stages_of"]
