"""`torchweave why --pipeline` on a real step of two gloo ranks, and on made traces of a device."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from torchweave.cli.main import EXIT_UNREADABLE, EXIT_USAGE, main
from torchweave.cli.pipeline_picture import measured_step, simulated_again
from torchweave.diagnose.actions import ran
from torchweave.schedule.build import build
from torchweave.schedule.plan import inputs_of, result_of
from torchweave.trace.read import read

TRACES = sorted((Path(__file__).parents[1] / "traces" / "pipeline").glob("dualpipev_rank*.json.gz"))


def event(category, name, begin_us, length_us, thread=1, **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin_us,
        "dur": length_us,
        "args": args,
    }


def written(path, events, **head):
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 0, **head}))
    return path


def test_a_real_step_is_the_plan_that_was_run():
    measured = measured_step([read(file, host_only=True) for file in reversed(TRACES)])
    plan = build("dualpipev", 2, 6)
    assert measured.plan.ranks == plan.ranks
    assert measured.plan.placement == plan.placement
    assert measured.peak_activations == (5, 5)


def test_no_action_of_a_real_step_begins_before_its_inputs_are_made():
    # catches a wrong clock, and waiting that is counted as work
    measured = measured_step([read(file, host_only=True) for file in TRACES])
    ends = {}
    for row in measured.ranks:
        assert all(span.begin <= span.end for span in row)
        assert all(before.end <= after.begin for before, after in pairwise(row))
        for span in row:
            ends |= {result_of(leaf): span.end for leaf in span.action.leaves()}
    for row in measured.ranks:
        for span in row:
            needs = [need for leaf in span.action.leaves() for need in inputs_of(leaf, measured.plan.num_stages)]
            assert all(ends[need] <= span.begin for need in needs)


def test_a_simulation_from_medians_is_not_longer_than_what_was_measured_by_much():
    measured = measured_step([read(file, host_only=True) for file in TRACES])
    predicted = simulated_again(measured)
    # it leaves out transfers and the host; what it has of them is the spread of the medians
    assert 0.5 * measured.step_time < predicted.step_time < 1.1 * measured.step_time


def test_device_work_counts_from_its_launch_on_whichever_thread_and_lasts_as_long_as_on_the_device(tmp_path):
    events = [
        event("user_annotation", "PP:0F0", 100, 50),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5, correlation=1),
        event("kernel", "gemm", 300, 40, thread=7, correlation=1, device=0, stream=7),
        event("user_annotation", "PP:0RECV_B0", 150, 10),
        event("cuda_runtime", "cudaLaunchKernel", 152, 5, correlation=2),
        event("kernel", "ncclDevKernel_SendRecv", 340, 900, thread=8, correlation=2, device=0, stream=8),
        event("user_annotation", "PP:(0F1;0B0)OVERLAP_F_B", 160, 60),
        event("user_annotation", "PP:0F1", 165, 20),
        event("user_annotation", "PP:0B0", 165, 50, thread=2),
        event("cuda_runtime", "cudaLaunchKernel", 170, 5, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 175, 5, thread=2, correlation=4),
        event("kernel", "gemm", 1300, 40, thread=7, correlation=3, device=0, stream=7),
        event("kernel", "gemm", 1310, 90, thread=7, correlation=4, device=0, stream=7),
    ]
    found = ran(read(written(tmp_path / "made.json", events)))
    assert [(action.text, action.end_ns - action.begin_ns) for action in found] == [
        ("0F0", 40_000),
        ("(0F1;0B0)OVERLAP_F_B", 100_000),
    ]
    assert found[1].begin_ns - found[0].begin_ns == 1_000_000


def step(begin_us, *names):
    for number, name in enumerate(names):
        yield event("user_annotation", f"PP:{name}", begin_us + 100 * number, 90)
        yield event("cpu_op", "aten::mm", begin_us + 100 * number + 30, 50)


def test_the_last_whole_step_of_a_trace_is_taken(tmp_path):
    # the recording began in the middle of one step and ended in the middle of another
    whole = ("0F0", "0F1", "0B0", "0B1")
    events = [*step(0, "0B0", "0B1"), *step(1000, *whole), *step(2000, *whole), *step(3000, "0F0", "0F1", "0B0")]
    found = ran(read(written(tmp_path / "steps.json", events), host_only=True))
    assert [action.text for action in found] == list(whole)
    assert [action.begin_ns for action in found] == [2_030_000, 2_130_000, 2_230_000, 2_330_000]


def test_an_action_that_ran_nothing_takes_no_time(tmp_path):
    events = [*step(0, "0F0", "0I0"), event("user_annotation", "PP:0W0", 300, 90)]
    (*_, last) = ran(read(written(tmp_path / "nothing.json", events), host_only=True))
    assert (last.text, last.end_ns - last.begin_ns) == ("0W0", 0)


def test_the_command_prints_draws_and_writes_json(tmp_path, capsys):
    words = ["why", "--pipeline", *map(str, TRACES)]
    assert main([*words, "--svg", str(tmp_path / "step.svg")]) == 0
    out = capsys.readouterr().out
    assert "pipeline step: 2 ranks, 4 stages, 6 microbatches" in out
    assert "simulated from these medians" in out
    assert (tmp_path / "step.svg").read_text().count("measured: step") == 1 + 1
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record) == [
        "step_ms", "bubble_share", "bubble_shares", "busy_ms", "peak_activations", "median_ms",
        "simulated_step_ms", "ranks",
    ]  # fmt: skip
    assert record["step_ms"] > record["simulated_step_ms"]


def test_one_ranks_trace_alone_is_shown_and_not_simulated(capsys):
    assert main(["why", "--pipeline", str(TRACES[0])]) == 0
    assert "not simulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([event("cpu_op", "aten::mm", 0, 10)], "annotations such as PP:0F3"),
        ([event("user_annotation", "PP:(0B1;0F2)OVERLAP_F_B", 0, 10)], "An action is written"),
    ],
)
def test_a_trace_without_a_pipeline_is_told(events, said, tmp_path, capsys):
    file = written(tmp_path / "none.json", events)
    assert main(["why", "--pipeline", str(file)]) == EXIT_UNREADABLE
    assert said in capsys.readouterr().err


def test_svg_needs_pipeline(capsys):
    assert main(["why", str(TRACES[0]), "--svg", "x.svg"]) == EXIT_USAGE
    assert "add `--pipeline`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--html x", "--perfetto x", "--between forward backward", "--window 1..2", "--range x"]
)
def test_options_of_a_diagnosis_are_refused_and_not_ignored(option, capsys):
    assert main(["why", "--pipeline", str(TRACES[0]), *option.split()]) == EXIT_USAGE
    assert "belongs to a diagnosis" in capsys.readouterr().err


def test_the_picture_of_the_docs_is_what_the_command_draws(tmp_path):
    assert main(["why", "--pipeline", *map(str, TRACES), "--svg", str(tmp_path / "step.svg")]) == 0
    docs = Path(__file__).parents[2] / "docs" / "pictures" / "pipeline.svg"
    assert (tmp_path / "step.svg").read_text() == docs.read_text()
