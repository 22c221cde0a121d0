"""A plan goes through csv, to torch and back."""

import pytest

from torchweave.errors import UnreadableInputError
from torchweave.schedule.action import Action
from torchweave.schedule.build import build, names
from torchweave.schedule.check import faults_of
from torchweave.schedule.files import from_csv, read_csv, to_csv
from torchweave.schedule.passes import add_reduce_grad, add_send_recv
from torchweave.schedule.plan import placed

NUMBERS = [(1, 2), (2, 4), (4, 8), (4, 12)]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("ranks", "microbatches"), NUMBERS)
@pytest.mark.parametrize("change", [lambda plan: plan, lambda plan: add_send_recv(add_reduce_grad(plan))])
def test_reading_what_was_written_gives_the_plan_again(name, ranks, microbatches, change):
    # also catches a wrong guess of where the stages stand
    plan = change(build(name, ranks + (name == "dualpipe" and ranks % 2), microbatches * 2))
    assert from_csv(to_csv(plan), name) == plan


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "microbatches"), NUMBERS)
def test_torch_loads_our_files_in_both_formats(name, ranks, microbatches, tmp_path):
    torch_plans = pytest.importorskip("torch_plans")
    num_chunks = 1 if name == "zb-h1" else 2
    plan = build(name, ranks, microbatches, num_chunks)
    theirs = torch_plans.multi_schedule(name, ranks, microbatches, num_chunks)
    for format_, written, order in (
        ("compute_only", plan, "pipeline_order"),
        ("compute_comms", add_send_recv(add_reduce_grad(plan)), "pipeline_order_with_comms"),
    ):
        file = tmp_path / "plan.csv"
        file.write_text(to_csv(written), encoding="utf-8")
        theirs._load_csv(file, format=format_)
        loaded = getattr(theirs, order)
        assert [[str(a) for a in loaded[r]] for r in range(ranks)] == [[str(a) for a in row] for row in written.ranks]


@pytest.mark.parametrize("name", ["interleaved", "zbv", "dualpipev"])
@pytest.mark.parametrize("format_", ["compute_only", "compute_comms"])
def test_we_load_torchs_files_in_both_formats(name, format_, tmp_path):
    torch_plans = pytest.importorskip("torch_plans")
    theirs = torch_plans.multi_schedule(name, 4, 8, 2)
    file = tmp_path / "torch.csv"
    theirs._dump_csv(file, format=format_)
    plan = read_csv(file)
    order = theirs.pipeline_order if format_ == "compute_only" else theirs.pipeline_order_with_comms
    assert [list(map(str, row)) for row in plan.ranks] == [
        [str(a) for a in order[r] if a is not None] for r in range(4)
    ]
    assert plan.placement == build(name, 4, 8).placement
    assert (plan.num_stages, plan.num_microbatches) == (8, 8)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"0F0,0B0\n1F0,1Q0\n", "row 2"),
        (b"", "without one"),
        (b"\n,,\n", "without one"),
        (b"\xff\xfe0F0", "UTF-8"),
        (b'0F0,"' + b"x" * 200_000 + b'"', "field larger"),
    ],
)
def test_a_file_that_is_no_plan_is_named_with_its_place(content, said, tmp_path):
    file = tmp_path / "broken.csv"
    file.write_bytes(content)
    with pytest.raises(UnreadableInputError, match=said) as caught:
        read_csv(file)
    assert "broken.csv" in str(caught.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(UnreadableInputError, match=r"none\.csv: No such file"):
        read_csv(tmp_path / "none.csv")


def test_one_action_astray_changes_neither_the_place_of_a_stage_nor_the_number_of_microbatches():
    rows = to_csv(build("dualpipe", 4, 8)).splitlines()
    rows[1] += ",3F0,0F99"
    plan = from_csv("\n".join(rows), "astray")
    assert (plan.placement, plan.num_microbatches) == (build("dualpipe", 4, 8).placement, 8)


def test_a_number_that_no_plan_of_this_length_has_is_astray_and_not_a_count():
    # else a slip of a key makes millions of missing actions
    plan = placed("slip", [[*map(Action.parse, ("0F0", "0F900000000", "0B0", "0B900000000", "900000000F0"))]] * 2)
    assert (plan.num_stages, plan.num_microbatches) == (1, 1)
    assert any("no microbatch 900000000" in fault.text for fault in faults_of(plan))
