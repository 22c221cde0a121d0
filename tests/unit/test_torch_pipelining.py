"""weave_schedule tells what it cannot weave, and changes nothing then."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    schedules,
)
from torch.distributed.pipelining.schedules import OVERLAP_F_B, _Action, _PipelineScheduleRuntime

from torchweave.adapters.torch_half import Half
from torchweave.adapters.torch_pipelining import weave_schedule
from torchweave.errors import UsageError


@pytest.fixture(autouse=True, scope="module")
def group():
    """One rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stages(num=2):
    return [PipelineStage(nn.Linear(2, 2), index, num, torch.device("cpu")) for index in range(num)]


def loss_fn(output, target):
    return (output - target).square().mean()


def dualpipev():
    return ScheduleDualPipeV(stages(), 3, loss_fn)


def with_plan(*actions):
    schedule = _PipelineScheduleRuntime(stages(), 1, loss_fn)
    schedule.pipeline_order_with_comms = {0: [_Action.from_str(action) for action in actions]}
    return schedule


def with_other_stages():
    schedule = dualpipev()
    schedule._stages = [SimpleNamespace(stage_index=0), *schedule._stages[1:]]
    return schedule


@pytest.mark.parametrize(
    ("make", "rule", "given"),
    [
        (lambda: "dualpipev", "takes a schedule that runs pairs", "str: 'dualpipev'"),
        (lambda: Schedule1F1B(stages(1)[0], 2, loss_fn), "takes a schedule that runs pairs", "Schedule1F1B"),
        (lambda: ScheduleZBVZeroBubble(stages(), 3, loss_fn), "has OVERLAP_F_B actions", "none of them a pair"),
        (lambda: _PipelineScheduleRuntime(stages(), 3, loss_fn), "has OVERLAP_F_B actions", "no plan yet"),
        (lambda: with_plan("(0F0;1SEND_B0)OVERLAP_F_B"), "made of forwards", "(0F0;1SEND_B0)OVERLAP_F_B"),
        (lambda: with_plan("()OVERLAP_F_B"), "made of forwards", "OVERLAP_F_B"),
        (with_other_stages, "A stage is one of torch", "namespace(stage_index=0)"),
        (lambda: weave_schedule(dualpipev()), "one function for its pairs", "ScheduleDualPipeV has one"),
    ],
)
def test_what_cannot_be_woven_is_named(make, rule, given):
    schedule = make()
    before = dict(getattr(schedule, "__dict__", {}))
    with pytest.raises(UsageError, match=rule) as caught:
        weave_schedule(schedule)
    assert given in caught.value.given
    assert caught.value.remedy
    assert getattr(schedule, "__dict__", {}) == before


def test_an_unknown_strategy_is_refused_where_it_is_given():
    with pytest.raises(UsageError, match="strategy is one of") as caught:
        weave_schedule(dualpipev(), strategy="fast")
    assert caught.value.given == "'fast'"


@pytest.mark.parametrize("name", ["OVERLAP_F_B", "REDUCE_GRAD", "_PipelineScheduleRuntime"])
def test_an_older_torch_is_named(monkeypatch, name):
    schedule = dualpipev()
    monkeypatch.delattr(schedules, name)
    with pytest.raises(UsageError, match=r"torch 2\.10 or newer") as caught:
        weave_schedule(schedule)
    assert torch.__version__ in caught.value.given
    assert name in caught.value.given


def test_a_torch_whose_schedules_have_changed_is_named(monkeypatch):
    """Catches bookkeeping that goes on without what it leans on."""
    schedule = dualpipev()
    del schedule.fwd_recv_ops
    with pytest.raises(UsageError, match=r"torch 2\.10 or newer") as caught:
        weave_schedule(schedule)
    assert "fwd_recv_ops" in caught.value.given


def test_a_pair_whose_input_was_never_received_says_so():
    """Catches a plan with sends and receives of one's own that forgot one: computing on a buffer's old content."""
    schedule = dualpipev()
    schedule._stages = schedule._stages[1:]
    context = SimpleNamespace(schedule_ref=schedule, arg_mbs=[()], kwarg_mbs=[{}], target_mbs=None)
    with pytest.raises(UsageError, match="receives what an action needs") as caught:
        Half(context, {}, _Action.from_str("1F0")).strand()
    assert "1F0" in caught.value.given


def test_the_same_schedule_is_returned_and_its_plan_untouched():
    schedule = dualpipev()
    plan = str(schedule.pipeline_order_with_comms)
    assert weave_schedule(schedule) is schedule
    assert str(schedule.pipeline_order_with_comms) == plan
    assert list(schedule._comp_type_to_function_map) == [OVERLAP_F_B]
