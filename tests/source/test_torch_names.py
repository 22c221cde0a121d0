"""The table of names holds what the installed torch has: a name that it lacks would be an alarm on right code."""

import torch

from torchweave.source import torch_names


def test_every_public_name_of_torch_cuda_is_known():
    there = {name for name in dir(torch.cuda) if not name.startswith("_") and callable(getattr(torch.cuda, name))}
    modules = {name for name in there if getattr(getattr(torch.cuda, name), "__module__", "").startswith("torch")}
    assert modules - torch_names.CUDA == set()


def test_every_method_of_streams_and_events_is_known():
    public = lambda cls: {name for name in dir(cls) if not name.startswith("_")}  # noqa: E731
    assert (public(torch.cuda.Stream) | public(torch.Stream)) - torch_names.STREAM == set()
    assert (public(torch.cuda.Event) | public(torch.Event)) - torch_names.EVENT == set()


def test_no_invention_exists():
    assert [name for name in torch_names.INSTEAD if hasattr(torch.cuda, name)] == []
    assert [name for name in torch_names.INSTEAD_STREAM if hasattr(torch.cuda.Stream, name)] == []
    assert [name for name in torch_names.INSTEAD_EVENT if hasattr(torch.cuda.Event, name)] == []
