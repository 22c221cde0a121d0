"""torch's own plans, got without processes: schedules are built with stages that only know where they stand."""

import pytest

pytest.importorskip("torch")

from torch.distributed.pipelining import schedules

MULTI = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,  # with one stage on each rank
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
SINGLE = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}


class Standing:
    """What a multi-stage schedule asks of a stage before it runs."""

    submod, has_backward, is_first, is_last = None, True, False, False

    def __init__(self, index, num_stages, num_ranks):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, num_stages, num_ranks, 0


class Recording(Standing):
    """A stage that writes down what a single-stage schedule runs on it; it has nobody to talk to."""

    def __init__(self, rank, num_ranks):
        super().__init__(rank, num_ranks, num_ranks)
        self.group_rank, self.log = rank, []

    def get_fwd_recv_ops(self, *_):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, microbatch, *_, **__):
        self.log.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, *_, **__):
        self.log.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, *_):
        pass


def multi_schedule(name, num_ranks, num_microbatches, num_chunks):
    stages = [Standing(c * num_ranks, num_ranks * num_chunks, num_ranks) for c in range(num_chunks)]
    return MULTI[name](stages, num_microbatches)


def torch_plan(name, num_ranks, num_microbatches, num_chunks):
    """Return the texts of torch's actions for each rank, without idle slots.

    Single-stage schedules are run on stages that record, because the plan that torch prints for 1F1B counts the last
    rank's forwards from 1 (2.10 to 2.13), while what it runs is right.

    Raises:
        ValueError: torch has no such plan.
    """
    if name in SINGLE:
        return tuple(_recorded(SINGLE[name], rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    order = multi_schedule(name, num_ranks, num_microbatches, num_chunks).pipeline_order
    return tuple(tuple(str(action) for action in order[rank] if action is not None) for rank in range(num_ranks))


def _recorded(schedule_class, rank, num_ranks, num_microbatches):
    stage = Recording(rank, num_ranks)
    schedule = schedule_class(stage, num_microbatches)
    schedule._initialize_stage = lambda *_: None  # would ask the stage for shapes
    schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
    return tuple(stage.log)
