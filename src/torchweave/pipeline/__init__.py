"""IDEA: run a plan on `torch.distributed`, over NCCL or gloo; a pair in the plan goes to weave."""

from torchweave.pipeline.make import Pipeline, build, stages_of

__all__ = ["Pipeline", "build", "stages_of"]
