"""The ways of this folder to run a pair of a model, as the benchmark measures them, and what each costs a user."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager

import torch.distributed as dist

from peers import barrier, hand_cut, question, two_streams
from torchweave.engine.pair import weave
from torchweave.measure import moe
from torchweave.measure.bench import Way
from torchweave.measure.subject import Subject, deterministic

LINES = {
    "auto": 1,
    "question": question.LINES,
    "two_streams": two_streams.LINES,
    "barrier": barrier.LINES,
    "hand_cut": hand_cut.LINES,
}
PLAIN_EXCHANGE = moe.all_to_all


def in_order(subject: Subject) -> dict[str, Way]:
    """Return the ways that issue their collectives in the same order on every rank."""
    cut = hand_cut.HandCut(subject)
    return {
        "question": Way(question.Question(subject.device).run),
        "hand_cut": Way(cut.run, cut.make_pair, lambda: cut.is_bit_equal(deterministic(subject.device))),
    }


def free(subject: Subject, second: dist.ProcessGroup | None = None) -> dict[str, Way]:
    """Return the ways of two free threads.

    Args:
        subject: What is run; its exchanges get the barrier's points, until `restore` is called.
        second: A second communicator over the same ranks. Two free threads issue the collectives of one communicator
            in another order on every rank, so that several ranks need it.
    """
    meeting, plain = barrier.Barrier(subject.device), two_streams.TwoStreams(subject.device)
    # the module's own exchange, with the barrier's points around it: they do nothing where no barrier stands
    moe.all_to_all = meeting.exchange(PLAIN_EXCHANGE)
    runs = {"two_streams": plain.run, "barrier": meeting.run}
    if second is None:
        return {name: Way(run) for name, run in runs.items()}
    found = {}
    for name, run in runs.items():
        apart = Apart(subject, second, run)
        found[name] = Way(apart.run_once, None, apart.is_bit_equal)
    return found


def restore() -> None:
    """Take the barrier's points out of the module again."""
    moe.all_to_all = PLAIN_EXCHANGE


class Apart:
    """Runs pairs whose two strands have a communicator each.

    Args:
        subject: A mixture of experts, with its own group.
        second: Another group over the same ranks.
        run: Runs a pair.
    """

    def __init__(self, subject: Subject, second: dist.ProcessGroup, run) -> None:
        self.subject, self.groups, self._run = subject, (subject.group, second), run
        self.at = 0

    def run(self, *, forward, backward):
        # a backward communicates on the group of its forward, which ran under the one that is left now
        self._use(1 - self.at)
        return self._run(forward=forward, backward=backward)

    def run_once(self, *, forward, backward):
        try:
            return self.run(forward=forward, backward=backward)
        finally:
            self._use(0)

    def is_bit_equal(self) -> bool:
        try:
            return self.subject.is_bit_equal(self.run)
        finally:
            self._use(0)

    def _use(self, at: int) -> None:
        self.at = at
        use_group(self.subject, self.groups[at])


def over(subject: Subject, groups: Mapping[int, dist.ProcessGroup]) -> dict[str, Way]:
    """Return weave's `turns` over communicators of fewer channels than the user's own, which serial keeps."""
    found = {}
    for channels, group in groups.items():
        fewer = Over(subject, group, f"turns_{channels}_channels")
        found[fewer.name] = Way(fewer.run, fewer.make_pair, fewer.is_bit_equal)
    return found


class Over:
    """Weaves pairs over another group than the subject's own.

    Args:
        subject: A mixture of experts.
        group: The other group, over the same ranks.
        name: What such pairs are called.
    """

    def __init__(self, subject: Subject, group: dist.ProcessGroup, name: str) -> None:
        self.subject, self.group, self.name = subject, group, name

    def make_pair(self):
        with self._on_group():
            return self.subject.make_pair()

    def run(self, *, forward, backward):
        with self._on_group():
            return weave(forward, backward, strategy="turns", kind=self.name)

    def is_bit_equal(self) -> bool:
        with self._on_group():
            return self.subject.is_bit_equal(self.run)

    @contextmanager
    def _on_group(self):
        use_group(self.subject, self.group)
        try:
            yield
        finally:
            use_group(self.subject, self.subject.group)


def use_group(subject: Subject, group: dist.ProcessGroup) -> None:
    """Let the forwards that follow communicate on a group."""
    for layer in subject.model.layers:
        layer.mixture.group = group
