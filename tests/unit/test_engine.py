"""What a process keeps between pairs."""

import gc
import weakref

import torch
import torch.distributed as dist

import torchweave as tw
from torchweave.engine.pair import engine


def test_a_destroyed_group_does_not_live_on():
    """Catches a reference to the default group: its threads would end the process badly at exit."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine().channels.lone_groups_are_slow = True
    try:

        def reduce():
            x = torch.ones(2)
            dist.all_reduce(x)
            return x

        for _ in range(3):
            assert tw.weave(reduce, reduce, strategy="turns").tolist() == [1, 1]
        group = weakref.ref(dist.group.WORLD)
    finally:
        engine().channels.lone_groups_are_slow = False
        dist.destroy_process_group()
    gc.collect()
    assert group() is None
