"""Pipelines side by side: what ranks of one of them tell each other does not reach the other one's."""

import torch.distributed as dist

from torchweave.pipeline.groups import own_store


def tell_and_read():
    rank = dist.get_rank()
    own = dist.new_group([rank], use_local_synchronization=True)
    # as `split_group` names groups: after their ranks within the group that was split
    own._set_group_name("of one name")
    own_store(own).set("failed", str(rank))
    dist.barrier()
    told = int(own_store(own).get("failed"))
    dist.barrier()
    return told


def test_groups_of_one_name_have_stores_of_their_own(pool):
    assert pool.run(tell_and_read) == [0, 1]
