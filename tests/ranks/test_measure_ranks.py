"""What measuring over several ranks stands on: meetings on the host, and a model on a group of the user's own."""

import datetime
import time

import torch
import torch.distributed as dist
from harness import attempt

from torchweave.engine.pair import weave
from torchweave.measure.bench import Bench, BenchOptions
from torchweave.measure.link import SimulatedLink
from torchweave.measure.meeting import Meeting
from torchweave.measure.subject import SubjectOptions

SIZES = SubjectOptions("moe", 1, 64, 16, 1, link_gbps=0.0)


def meet_often():
    world = dist.group.WORLD
    rank = dist.get_rank()
    said = [Meeting(world).tell(f"{number} of {rank}") for number in range(3)]
    other = dist.new_group(list(range(dist.get_world_size())))
    said += [Meeting(one).tell(f"last of {rank}") for one in (other, world)]
    return said


def test_every_meeting_hears_what_is_said_there(pool):
    """Catches a meeting that reads what an earlier one, or one of another group, left in the store."""
    expected = [[f"{number} of 0", f"{number} of 1"] for number in (*range(3), "last", "last")]
    assert pool.run(meet_often) == [expected, expected]


def come_alone():
    return attempt(Meeting(dist.group.WORLD, 0.3).tell)[:2] if dist.get_rank() == 1 else None


def test_who_does_not_come_is_named(pool):
    """Catches a meeting without a limit."""
    kind, text = pool.run(come_alone)[1]
    assert kind == "WaitLimitError", text
    assert "rank 0" in text


def bench_on_own_group():
    own = dist.new_group(timeout=datetime.timedelta(seconds=20))
    default = dist.group.WORLD
    before = default._get_sequence_number_for_group()
    torch.set_flush_denormal(True)
    bench = Bench(BenchOptions(SIZES, ("turns",), rounds=2), torch.device("cpu"), group=own)
    with bench.subject.link.record() as recording, bench.subject.link:
        forward, backward = bench.subject.make_pair()
        weave(forward, backward, strategy="turns")
        assert bench.subject.is_bit_equal(weave)
    groups = {call.operation.group_of(call.args).group_name for call in recording.calls}
    assert groups == {own.group_name}, groups
    return default._get_sequence_number_for_group() - before


def test_a_model_on_the_users_own_group_uses_no_other(pool):
    """Catches a benchmark that measures the default group where another, slower one was given."""
    assert pool.run(bench_on_own_group) == [0, 0]


def meet_while_muted():
    store = dist.distributed_c10d._get_default_store()
    with SimulatedLink(None) as link, link.mute():
        if dist.get_rank() == 0:
            time.sleep(0.3)
            store.set("rank 0 is here", "")
        dist.barrier()
        return store.check(["rank 0 is here"])


def test_ranks_begin_together_where_nothing_is_sent(pool):
    """Catches a barrier that is muted: then computation alone includes what the ranks are apart."""
    assert pool.run(meet_while_muted) == [True, True]
