"""One rank's failure: every rank raises our error, with the same rank, stage, action and microbatch, in time."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import DIM
from pipelines import blocks, build, data, mse
from pool import RanksFailedError
from torch import nn

import torchweave as tw
from torchweave.errors import PipelineError, UsageError

LIMIT_S = 6.0


class Trap(nn.Module):
    """A stage that does something unexpected in the forward or backward of one of its microbatches."""

    def __init__(self, stage, go_off, *, in_backward, microbatch):
        super().__init__()
        self.stage, self.go_off, self.in_backward, self.left = stage, go_off, in_backward, microbatch

    def forward(self, x):
        if self.in_backward and x.requires_grad:
            x = x * 1.0
            x.register_hook(self._hook)
        elif not self.in_backward:
            self._count()
        return self.stage(x)

    def _hook(self, gradient):
        self._count()
        return gradient

    def _count(self):
        self.left -= 1
        if self.left == -1:
            self.go_off()


def planted():
    raise ValueError("planted here")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def trapped(index, go_off, *, in_backward, microbatch):
    """Return a maker of models of which one stage is trapped."""

    def make(num_stages, seed):
        stages = blocks(num_stages, seed)
        stages[index] = Trap(stages[index], go_off, in_backward=in_backward, microbatch=microbatch)
        return stages

    return make


def told_by(pipeline, step, all_live=True):
    """Run a step that has to fail; return who is said to have failed where, and how long it took to say so.

    Where all ranks live on, none leaves before every other one was told; and their own group still works.
    """
    begin = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        step()
    took_s = time.monotonic() - begin
    error = caught.value
    with pytest.raises(PipelineError) as again:  # a pipeline that has failed says so, and does not hang
        pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=mse)
    assert str(again.value) == str(error)
    if all_live:
        dist.barrier()
    for part in (f"rank {error.rank}", f"action {error.action}", error.cause):
        assert part in str(error)
    return (error.rank, error.stage, error.action, error.microbatch), error.cause, took_s


def one_rank_raises(schedule, stage, in_backward, microbatch):
    make = trapped(stage, planted, in_backward=in_backward, microbatch=microbatch)
    pipeline, _, _ = build(schedule, make)
    return told_by(pipeline, lambda: pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=mse))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", "dualpipev"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_an_exception_on_one_rank_is_every_ranks_error(pool4, schedule, in_backward):
    answers = pool4.run(one_rank_raises, schedule, 2, in_backward, 3)
    places = {place for place, _, _ in answers}
    assert len(places) == 1, places
    (place,) = places
    assert place[1] == 2
    assert place[2][:2] in (("2B", "2I") if in_backward else ("2F",))
    assert all("ValueError: planted here" in cause for _, cause, _ in answers)
    assert max(took_s for _, _, took_s in answers) < LIMIT_S


def one_rank_is_killed(schedule, victim_stage, microbatch):
    make = trapped(victim_stage, killed, in_backward=False, microbatch=microbatch)
    pipeline, _, _ = build(schedule, make)
    step = lambda: pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=mse)  # noqa: E731
    place, cause, took_s = told_by(pipeline, step, all_live=False)
    assert place[0] == victim_stage, place
    assert place[1] in (victim_stage, None), place
    assert "gone" in cause, cause
    assert took_s < LIMIT_S, took_s


# each costs new processes
@pytest.mark.parametrize(
    ("victim", "microbatch"),
    [(2, 3), pytest.param(3, 0, marks=pytest.mark.long), pytest.param(0, 1, marks=pytest.mark.long)],
)
def test_a_killed_rank_is_named_by_all_others(pool4, victim, microbatch):
    with pytest.raises(RanksFailedError) as caught:
        pool4.run(one_rank_is_killed, "1f1b", victim, microbatch)
    # the survivors checked what they were told; only the victim has no answer
    told = str(caught.value)
    assert f"--- rank {victim} ---\nthe process died: exit code -9" in told
    assert told.count("--- rank") == 1, told


def one_rank_is_silent():
    def sleep():
        time.sleep(4)

    pipeline, _, _ = build("1f1b", trapped(1, sleep, in_backward=False, microbatch=2), limit_s=1.0)
    return told_by(pipeline, lambda: pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=mse))


def test_a_rank_that_does_nothing_is_named_when_the_limit_is_over(pool4):
    answers = pool4.run(one_rank_is_silent)
    # two ranks wait for it, each for another action; the first to give up is heard by all
    assert len({place for place, _, _ in answers}) == 1
    assert answers[0][0] in ((1, 1, "1F2", 2), (1, 1, "1B0", 0))
    assert all(f"waited 1 s for {answers[0][0][2]} on rank 1" in cause for _, cause, _ in answers)
    assert max(took_s for _, _, took_s in answers) < LIMIT_S


def shapes_do_not_fit():
    def make(num_stages, seed):
        stages = blocks(num_stages, seed)
        stages[2] = nn.Linear(DIM + 1, DIM)
        return stages

    pipeline, _, _ = build("1f1b", make)
    return told_by(pipeline, lambda: pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=mse))


def test_a_stage_that_does_not_fit_the_one_before_it(pool4):
    answers = pool4.run(shapes_do_not_fit)
    assert {place for place, _, _ in answers} == {(2, 2, "2F0", 0)}
    assert all("RuntimeError: mat1 and mat2 shapes cannot be multiplied" in cause for _, cause, _ in answers)


class Growing(nn.Module):
    """A stage whose outputs' shape follows from how often it ran."""

    def __init__(self, stage):
        super().__init__()
        self.stage, self.runs = stage, 0

    def forward(self, x):
        self.runs += 1
        return self.stage(x)[: 1 if self.runs > 8 else None]


def shapes_change(dynamic):
    def make(num_stages, seed):
        stages = blocks(num_stages, seed)
        stages[1] = Growing(stages[1])
        return stages

    def loss_fn(output, target):
        return output.square().mean()

    pipeline, _, _ = build("1f1b", make, dynamic_shapes=dynamic)
    pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=loss_fn)
    if dynamic:
        return pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=loss_fn)[0].item()
    return told_by(pipeline, lambda: pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=loss_fn))


def test_shapes_that_change_although_the_inputs_do_not(pool4):
    answers = pool4.run(shapes_change, False)
    assert {place for place, _, _ in answers} == {(1, 1, "1SEND_F0", 0)}
    assert all("dynamic_shapes=True" in cause for _, cause, _ in answers)
    assert len(set(pool4.run(shapes_change, True))) == 1


def the_loss_is_nan(allowed):
    def make(num_stages, seed):
        torch.manual_seed(seed)
        return [nn.Linear(DIM, DIM) for _ in range(num_stages)]

    pipeline, _, _ = build("dualpipev", make, allow_nonfinite_loss=allowed)
    x, y = data(8, 0)
    x[2 * 5] = float("nan")  # microbatch 5, of 2 rows each
    if allowed:
        return pipeline.step(x, y, num_microbatches=8, loss_fn=mse)[0].isnan().item()
    return told_by(pipeline, lambda: pipeline.step(x, y, num_microbatches=8, loss_fn=mse))


def test_a_loss_that_is_no_number(pool4):
    answers = pool4.run(the_loss_is_nan, False)
    places = {place for place, _, _ in answers}
    assert len(places) == 1
    (rank, stage, action, microbatch) = places.pop()
    assert (rank, stage, microbatch) == (0, 7, 5)
    assert action == "7F5"
    assert all("nan" in cause for _, cause, _ in answers)
    assert pool4.run(the_loss_is_nan, True) == [True] * 4


def ranks_disagree():
    pipeline, _, _ = build("1f1b")
    count = 8 if dist.get_rank() != 2 else 4
    return told_by(pipeline, lambda: pipeline.step(*data(8, 0), num_microbatches=count, loss_fn=mse))


def test_ranks_that_cut_the_batch_differently(pool4):
    answers = pool4.run(ranks_disagree)
    assert {place for place, _, _ in answers} == {(2, None, "the beginning of the step", None)}
    assert all("Every rank of a pipeline runs the same num_microbatches" in cause for _, cause, _ in answers)


def the_user_is_wrong():
    pipeline, _, _ = build("1f1b")
    told = []
    for call in (
        lambda: tw.pipeline.build([nn.Linear(1, 1)] * 2, "1f1b"),
        lambda: tw.pipeline.build([], "1f1b"),
        lambda: tw.pipeline.build([nn.Linear(1, 1)], "1f1c"),
        lambda: tw.pipeline.build([nn.Linear(1, 1)], "1f1b", strategy="fast"),
        lambda: tw.pipeline.build([nn.Linear(1, 1)], "1f1b", tied={"w": nn.Parameter(torch.ones(1))}),
        lambda: pipeline.step(*data(8, 0), num_microbatches=0, loss_fn=mse),
        lambda: pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=None),
        lambda: pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=mse, reduction="max"),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.remedy
        told.append(caught.value.rule)
    # nothing of it has broken anything
    pipeline.step(*data(8, 0), num_microbatches=8, loss_fn=mse)
    return told


def test_a_users_mistake_is_named_and_breaks_nothing(pool):
    one, other = pool.run(the_user_is_wrong)
    assert len(one) == len(other) == 8
