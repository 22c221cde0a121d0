"""A host that reads from a device gives its turn away: tried with a device that is played."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import torchweave as tw
from torchweave.engine import collectives, pair, reads
from torchweave.errors import WaitLimitError


@pytest.fixture
def alone(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    pair.engine().close()
    pair.engine.cache_clear()
    dist.destroy_process_group()


@pytest.fixture
def device(monkeypatch):
    """Plays a device: tensors of 16 bits are on it, and their numbers come when the other strand has gone on."""
    log = []

    def begin(tensor):
        log.append(f"copy by {threading.current_thread() is threading.main_thread()}")
        return tensor.clone(), lambda: True

    monkeypatch.setattr(collectives, "blocks", lambda tensor: tensor.dtype == torch.int16)
    monkeypatch.setattr(reads, "begin_read", begin)
    return log


def test_the_other_strand_goes_on_while_numbers_come(alone, device):
    """Catches a host that waits with the turn in its hand."""
    numbers = torch.tensor([3, 4], dtype=torch.int16)
    weight = torch.ones(2, requires_grad=True)
    order = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            order.append("backward begins")
            order.append(("backward reads", numbers.tolist()))
            order.append("backward ends")
            return grad

    def forward():
        order.append("forward begins")
        order.append(("forward reads", numbers.tolist()))
        order.append("forward ends")

    for strategy in ("turns", "turns"):
        loss = Noted.apply(weight).sum()
        order.clear()
        tw.weave(forward, lambda loss=loss: loss.backward(), strategy=strategy)
    assert order == [
        "backward begins",
        "forward begins",
        ("backward reads", [3, 4]),
        "backward ends",
        ("forward reads", [3, 4]),
        "forward ends",
    ]
    assert len(device) == 4


def test_outside_of_a_pair_and_on_the_host_nothing_changes(alone, device):
    """Catches a copy where there is nobody to go on."""
    numbers = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    tw.weave(lambda: None, lambda: None)
    assert numbers.tolist() == [[1, 2], [3, 4]]
    tw.weave(lambda: torch.ones(2).tolist(), lambda: None)
    assert device == []


def test_tensors_are_left_as_they_were():
    """Catches a method that stays replaced after the engine has closed."""
    engine = pair.Engine()
    engine.interception.install()
    assert "tolist" in vars(torch.Tensor)
    assert torch.arange(3).tolist() == [0, 1, 2]
    engine.close()
    assert "tolist" not in vars(torch.Tensor)


def test_numbers_that_do_not_come_are_told_within_the_limit():
    """Catches a host that waits for ever for a device that hangs."""
    with pytest.raises(WaitLimitError, match=r"the forward strand waited 0\.05 s for the device to copy"):
        reads.finish_read(lambda: False, 0.05, "forward")
