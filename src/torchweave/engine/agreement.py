"""IDEA: ranks agree over the store, never over the communicator that is in question.

Three things are said there: what the woven order of a new kind of pair would be (`agree`), that a strand failed
(`Failure`), and that a group is broken. Every wait has the group's timeout as its limit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from torchweave.engine.channels import Channel
from torchweave.engine.order import Action, disagreement, members_of
from torchweave.errors import BrokenGroupError, WaitLimitError

_PREFIX = "torchweave"


class Statement(NamedTuple):
    """What one rank says of a new kind of pair.

    Attributes:
        rank: Global rank.
        vetoes: Why this rank cannot run the pair by a strategy, by its name; "" where it can.
        plan: Its woven order.
        groups: Members (global ranks) of each group that the plan touches, by name.
        counts: How many agreements each channel had before this one.
    """

    rank: int
    vetoes: dict[str, str]
    plan: tuple[Action, ...]
    groups: dict[str, list[int]]
    counts: dict[str, int]

    def encode(self) -> bytes:
        """Return the statement as bytes for the store, headed by its hash."""
        body = json.dumps(self._asdict()).encode()
        return self.fingerprint().encode() + b"\n" + body

    def fingerprint(self) -> str:
        """Hash what has to be the same where every rank does the same: all but the rank itself."""
        shared = json.dumps(self._replace(rank=-1)._asdict(), sort_keys=True)
        return hashlib.sha256(shared.encode()).hexdigest()

    @classmethod
    def decode(cls, data: bytes) -> Statement:
        """Read a statement of any rank."""
        fields: dict[str, Any] = json.loads(data.partition(b"\n")[2])
        fields["plan"] = tuple(Action(*action) for action in fields["plan"])
        return cls(**fields)


class Ledger:
    """Numbered notes of one process in the default store.

    Args:
        rank: This process's global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = dist.distributed_c10d._get_default_store()

    def post(self, topic: str, value: bytes) -> None:
        """Say something under a topic, once."""
        self._store.set(f"{_PREFIX}/{topic}/{self._rank}", value.decode())

    def read(self, topic: str, rank: int) -> bytes | None:
        """Return what a rank said under a topic, or None where it has said nothing yet."""
        key = f"{_PREFIX}/{topic}/{rank}"
        if self._store.check([key]):
            return bytes(self._store.get(key))
        return None

    def wait(
        self,
        topics: Sequence[tuple[str, int]],
        limit_s: float,
        why: str,
        alarms: Sequence[tuple[str, int]] = (),
    ) -> list[bytes]:
        """Return what each rank said under its topic, waiting for those that have not spoken.

        Args:
            topics: Topic and rank of each.
            limit_s: How long to wait in all, seconds.
            why: What this is for, for the error.
            alarms: Topics under which a rank says that it will not speak; read while waiting.

        Raises:
            WaitLimitError: Some rank did not speak within the limit.
            BrokenGroupError: Some rank said so under an alarm.
        """
        found: dict[tuple[str, int], bytes] = {}
        end, pause = time.monotonic() + limit_s, 0.0005
        while True:
            for topic in topics:
                if topic not in found and (said := self.read(*topic)) is not None:
                    found[topic] = said
            missing = [topic for topic in topics if topic not in found]
            if not missing:
                return [found[topic] for topic in topics]
            for alarm, other in alarms:
                if (note := self.read(alarm, other)) is not None:
                    raise BrokenGroupError(alarm.split("/")[1], _story(note))
            if time.monotonic() > end:
                late = ", ".join(str(rank) for rank in sorted({rank for _, rank in missing}))
                raise WaitLimitError(f"rank {self._rank}", f"rank {late} {why}", limit_s)
            time.sleep(pause)
            pause = min(pause * 2, 0.05)


def agree(channels: Sequence[Channel], plan: tuple[Action, ...], vetoes: dict[str, str], rank: int) -> dict[str, str]:
    """Agree with every rank that these channels connect whether this kind of pair may be woven.

    Each rank publishes its woven order under each of its channels. Where all members say the same, that is the proof;
    otherwise the plans of all connected ranks are run against each other.

    Args:
        channels: What the pair communicated on.
        plan: This rank's woven order.
        vetoes: Why this rank cannot run the pair by a strategy, by its name; "" where it can.
        rank: This process's global rank.

    Returns:
        The same for all connected ranks together: equal on each of them.

    Raises:
        WaitLimitError: A rank said nothing within the group's timeout.
        BrokenGroupError: A rank failed meanwhile.
    """
    channels = [channel for channel in channels if channel.has_peers]
    if not channels:
        return vetoes
    groups = {channel.group: list(channel.group_ranks) for channel in channels}
    counts = {channel.name: channel.next_agreement() for channel in channels}
    mine = Statement(rank, vetoes, plan, groups, counts)
    ledger, limit_s = Ledger(rank), min(channel.limit_s for channel in channels)
    for channel in channels:
        ledger.post(_agreement_topic(channel.name, counts[channel.name]), mine.encode())
    topics = _topics([mine])
    said = ledger.wait(topics, limit_s, "to describe a new kind of pair", alarms=_alarms(channels, rank))
    ours = mine.fingerprint()
    if all(data.partition(b"\n")[0].decode() == ours for data in said):
        return vetoes
    return _judge({rank: mine}, topics, said, ledger, limit_s)


def _judge(
    known: dict[int, Statement],
    topics: Sequence[tuple[str, int]],
    said: Sequence[bytes],
    ledger: Ledger,
    limit_s: float,
) -> dict[str, str]:
    """Collect the statements of every connected rank, and run their plans against each other."""
    while True:
        known.update({rank: Statement.decode(data) for (_, rank), data in zip(topics, said, strict=True)})
        topics = [(topic, rank) for topic, rank in _topics(known.values()) if rank not in known]
        if not topics:
            break
        said = ledger.wait(topics, limit_s, "to describe a new kind of pair")
    groups = {name: ranks for statement in known.values() for name, ranks in statement.groups.items()}
    clash = disagreement({rank: statement.plan for rank, statement in known.items()}, groups)
    verdict = {}
    for strategy in known[min(known)].vetoes:
        vetoes = [
            f"on rank {rank}, {known[rank].vetoes[strategy]}" for rank in sorted(known) if known[rank].vetoes[strategy]
        ]
        verdict[strategy] = vetoes[0] if vetoes else clash
    return verdict


def _topics(statements: Iterable[Statement]) -> list[tuple[str, int]]:
    """Return one topic for every rank that the statements' channels name."""
    found: dict[int, str] = {}
    for statement in statements:
        for name, count in statement.counts.items():
            for member in members_of(name, statement.groups):
                found.setdefault(member, _agreement_topic(name, count))
    return [(topic, rank) for rank, topic in sorted(found.items())]


def _agreement_topic(channel: str, count: int) -> str:
    return f"kind/{channel}/{count}"


def _alarms(channels: Iterable[Channel], rank: int, pairs_ago: int = 0) -> list[tuple[str, int]]:
    """Return where the other members of some channels would say that a strand failed in a pair."""
    return sorted(
        {
            (_failure_topic(channel, pairs_ago), other)
            for channel in channels
            for other in channel.members
            if other != rank
        }
    )


def _story(note: bytes) -> str:
    return note.decode().partition("\n")[2]


def _failure_topic(channel: Channel, pairs_ago: int = 0) -> str:
    return f"failed/{channel.name}/{channel.num_pairs - pairs_ago}"


def tell_failure(channels: Sequence[Channel], rank: int, where: str, what: str) -> None:
    """Say to all members that a strand failed here.

    Args:
        channels: What the pair communicates on.
        rank: This process's global rank.
        where: Strand and step at which it failed: the same text on every rank that fails alike.
        what: The error, for the other ranks to show.
    """
    if any(channel.has_peers for channel in channels):
        ledger = Ledger(rank)
        note = f"{where}\nrank {rank} failed in its {where}: {what}".encode()
        for channel in channels:
            ledger.post(_failure_topic(channel), note)


def failed_alike(channels: Sequence[Channel], rank: int, where: str, limit_s: float) -> str:
    """Learn whether every member failed at the same place.

    Args:
        channels: What the pair communicates on.
        rank: This process's global rank.
        where: As for `tell_failure`.
        limit_s: How long to wait for the others, seconds.

    Returns:
        "" where every member failed alike and the groups still work, else why they are broken.
    """
    topics = _alarms(channels, rank)
    if not topics:
        return ""
    try:
        said = Ledger(rank).wait(topics, limit_s, "to fail alike")
    except WaitLimitError as error:
        return f"rank {rank} failed in its {where}, and waited {limit_s:g} s for {error.awaited}"
    for note in said:
        if note.decode().partition("\n")[0] != where:
            return f"rank {rank} failed in its {where}, but {_story(note)}"
    return ""


def failures_of_others(channels: Sequence[Channel], rank: int, limit_s: float) -> str:
    """Return what another rank said of its failure, or "" where none has spoken within the limit.

    A rank that failed at the end of a pair is missed in the next one, so the pair before counts too.
    """
    topics = [topic for pairs_ago in (0, 1) for topic in _alarms(channels, rank, pairs_ago)]
    ledger = Ledger(rank) if topics else None
    end = time.monotonic() + limit_s
    while ledger is not None:
        for topic, other in topics:
            if (said := ledger.read(topic, other)) is not None:
                return _story(said)
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return ""
