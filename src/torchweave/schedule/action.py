"""IDEA: an action is a small tuple that prints, and reads back, as `torch.distributed.pipelining` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, cast, get_args

from torchweave.errors import UsageError

Kind = Literal[
    "F", "B", "I", "W", "OVERLAP_F_B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"
]

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT: Final = "I"
WEIGHT: Final = "W"
PAIR: Final = "OVERLAP_F_B"
SEND_F: Final = "SEND_F"
RECV_F: Final = "RECV_F"
SEND_B: Final = "SEND_B"
RECV_B: Final = "RECV_B"
REDUCE_GRAD: Final = "REDUCE_GRAD"

KINDS: Final = frozenset(get_args(Kind))
COMPUTE: Final = frozenset({FORWARD, BACKWARD, INPUT, WEIGHT, PAIR})
GRADIENT: Final = frozenset({BACKWARD, INPUT})  # what the stage before waits for
SENDS: Final = frozenset({SEND_F, SEND_B})
RECEIVES: Final = frozenset({RECV_F, RECV_B})
P2P: Final = SENDS | RECEIVES
WHOLE_STAGE: Final = frozenset({"UNSHARD", "RESHARD", REDUCE_GRAD})  # of no microbatch

_SINGLE = re.compile(r"(\d+)([A-Z_]+?)(\d*)", re.ASCII)
_PAIR = re.compile(r"\(([^()]*)\)([A-Z_]+)", re.ASCII)


class Action(NamedTuple):
    """What a rank does in one place of its schedule.

    Attributes:
        stage: The stage, counted from the model's first. A pair has two; it holds its forward's, see `parts`.
        kind: F forward; B backward; I, W its input and weight gradients alone; OVERLAP_F_B a pair; SEND_F, RECV_F,
            SEND_B, RECV_B point-to-point, of the stage on this side; UNSHARD, RESHARD, REDUCE_GRAD of FSDP or of
            data parallelism.
        microbatch: The microbatch; None for what belongs to a whole stage. A pair holds its forward's.
        parts: Of a pair: its forward and its backward, in the order in which a serial run takes them. Else empty.

    Source: torch/distributed/pipelining/schedules.py, `_Action`, torch 2.10 to 2.13 (which writes -1 for the stage
    of a pair; the text is the same).
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def leaves(self) -> tuple[Action, ...]:
        """Return the parts of a pair, or the action itself."""
        return self.parts or (self,)

    @staticmethod
    def parse(text: str) -> Action:
        """Read an action as torch writes it.

        Args:
            text: Such as `0F3`, `3SEND_F1`, `1REDUCE_GRAD` or `(0F7;7B3)OVERLAP_F_B`; spaces around it are ignored.

        Returns:
            The action; `str` gives the text again.

        Raises:
            UsageError: This is no action.
        """
        text = text.strip()
        if match := _PAIR.fullmatch(text):
            parts = tuple(Action.parse(part) for part in match[1].split(";"))
            kinds = tuple(part.kind for part in parts)
            if match[2] == PAIR and kinds in ((FORWARD, BACKWARD), (FORWARD, INPUT)):
                return pair(*parts)
        elif match := _SINGLE.fullmatch(text):
            stage, kind, microbatch = match.groups()
            if kind in KINDS - {PAIR} and bool(microbatch) != (kind in WHOLE_STAGE):
                return Action(int(stage), cast("Kind", kind), int(microbatch) if microbatch else None)
        raise UsageError(
            "An action is written [stage][kind][microbatch], and a pair (forward;backward)OVERLAP_F_B",
            given=repr(text[:60]),
            remedy="write it as 2F0, 1B3, 0I3, 0W3, 3SEND_F1, 1REDUCE_GRAD or (0F7;7B3)OVERLAP_F_B",
        )


def pair(forward: Action, backward: Action) -> Action:
    """Return the action that overlaps a forward and a backward.

    Args:
        forward: An F action.
        backward: A B or I action.
    """
    return Action(forward.stage, PAIR, forward.microbatch, (forward, backward))


def leaves(actions: tuple[Action, ...]) -> Iterator[tuple[int, Action]]:
    """Yield every action, and the parts of a pair instead of the pair, with the place of each."""
    for place, action in enumerate(actions):
        for leaf in action.leaves():
            yield place, leaf
