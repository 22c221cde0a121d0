"""An action prints and reads back as torch writes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweave.errors import UsageError
from torchweave.schedule.action import COMPUTE, P2P, PAIR, WHOLE_STAGE, Action, pair

numbers = st.integers(0, 1000)
of_microbatch = st.tuples(numbers, st.sampled_from(sorted((COMPUTE | P2P) - {PAIR})), numbers).map(lambda t: Action(*t))
of_stage = st.tuples(numbers, st.sampled_from(sorted(WHOLE_STAGE))).map(lambda t: Action(*t))
pairs = st.builds(
    lambda s, m, t, n, kind: pair(Action(s, "F", m), Action(t, kind, n)),
    numbers,
    numbers,
    numbers,
    numbers,
    st.sampled_from("BI"),
)
actions = of_microbatch | of_stage | pairs


@given(actions)
def test_reading_what_was_printed_gives_the_action_again(action):
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action}\t") == action


@given(actions)
def test_torch_reads_and_prints_the_same_text(action):
    # catches any way in which our notation drifts from torch's
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    read = schedules._Action.from_str(str(action))
    assert str(read) == str(action)
    assert [part.stage_index for part in read.sub_actions or ()] == [part.stage for part in action.parts]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", Action(0, "F", 3)),
        ("12W0", Action(12, "W", 0)),
        ("0SEND_F3", Action(0, "SEND_F", 3)),
        ("1UNSHARD", Action(1, "UNSHARD")),
        ("(0F7;7B3)OVERLAP_F_B", Action(0, "OVERLAP_F_B", 7, (Action(0, "F", 7), Action(7, "B", 3)))),
    ],
)
def test_texts_that_must_not_change(text, action):
    assert Action.parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "F0", "0F", "0X3", "0f3", "0F3 1B2", "0F3extra", "-1F0", "0REDUCE_GRAD3", "0OVERLAP_F_B1", "٣F٣", "0F1;0B2",
        "(0F1)OVERLAP_F_B", "(0B1;0F2)OVERLAP_F_B", "(0F1;0B2)", "(0F1;0B2)B", "(0F1;0B2;0B3)OVERLAP_F_B",
        "((0F1;0B2)OVERLAP_F_B;0B3)OVERLAP_F_B",
    ],
)  # fmt: skip
def test_what_is_no_action_is_refused_with_what_was_given(text):
    with pytest.raises(UsageError, match="Remedy") as caught:
        Action.parse(text)
    assert caught.value.given == repr(text)


def test_leaves_of_a_pair_are_its_parts_and_of_another_action_itself():
    forward, backward = Action(0, "F", 1), Action(3, "B", 0)
    assert pair(forward, backward).leaves() == (forward, backward)
    assert forward.leaves() == (forward,)
