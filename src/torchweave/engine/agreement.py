"""IDEA: ranks agree over the store, never over the communicator that is in question.

What is said there: what the woven order of a new kind of pair would be (`agree`), how long its pairs take (`Talk`), and
that a strand failed. Every wait has the group's timeout as its limit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from torchweave.engine.channels import Channel
from torchweave.engine.order import Action, disagreement, members_of
from torchweave.errors import BrokenGroupError, WaitLimitError

_PREFIX = "torchweave"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Statement(NamedTuple):
    """What one rank says of a new kind of pair.

    Attributes:
        rank: Global rank.
        vetoes: Why this rank cannot run the pair by a strategy, by its name; "" where it can.
        plan: Its woven order.
        groups: Members (global ranks) of each group that the plan touches, by name.
        counts: The number of this agreement on each channel.
        times: What this rank measured, ms, by a strategy's name.
    """

    rank: int
    vetoes: dict[str, str]
    plan: tuple[Action, ...]
    groups: dict[str, list[int]]
    counts: dict[str, int]
    times: dict[str, float]

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

    def count(self, topic: str) -> int:
        """Return how often this rank has counted under a topic, this time included."""
        return int(self._store.add(f"{_PREFIX}/count/{topic}/{self._rank}", 1))

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
        keys = [f"{_PREFIX}/{topic}/{rank}" for topic, rank in topics]
        end, pause = time.monotonic() + limit_s, 0.0005
        while True:
            # one question for all ranks, however many they are
            if self._store.check(keys):
                return [bytes(said) for said in self._store.multi_get(keys)]
            for alarm, other in alarms:
                if (note := self.read(alarm, other)) is not None:
                    raise BrokenGroupError(alarm.split("/")[1], _story(note))
            if time.monotonic() > end:
                missing = {rank for key, (_, rank) in zip(keys, topics, strict=True) if not self._store.check([key])}
                late = ", ".join(str(rank) for rank in sorted(missing)) or "another"
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
    counts = {channel.name: channel.next_agreement() for channel in channels if channel.has_peers}
    return propose("kind", "to describe a new kind of pair", channels, counts, plan, vetoes, rank)()


def propose(
    about: str,
    why: str,
    channels: Sequence[Channel],
    counts: Mapping[str, int],
    plan: tuple[Action, ...],
    vetoes: dict[str, str],
    rank: int,
) -> Callable[[], dict[str, str]]:
    """Publish what this rank would do, and return what learns whether all connected ranks' plans fit together.

    Args:
        about: The round's name.
        why: What the others are waited for, for an error: "to ...".
        channels: What the pair communicates on.
        counts: The number of the kind's agreement on each channel.
        plan: This rank's woven order.
        vetoes: As for `agree`.
        rank: This process's global rank.

    Returns:
        A function that returns and raises what `agree` does.
    """
    peers = [channel for channel in channels if channel.has_peers]
    if not peers:
        return lambda: vetoes
    talk = Talk(about, why, peers, counts, rank)
    mine = talk.say(plan=plan, vetoes=vetoes)

    def verdict() -> dict[str, str]:
        ours = mine.fingerprint()
        if all(data.partition(b"\n")[0].decode() == ours for data in talk.hear([mine])):
            return vetoes
        return _judge(talk.everybody(mine))

    return verdict


class Talk:
    """A round in which every rank that some channels connect says something, and learns what all the others said.

    Args:
        about: The round's name.
        why: What the others are waited for, for an error: "to ...".
        channels: What the pair communicates on, with peers.
        counts: The number of the kind's agreement on each channel.
        rank: This process's global rank.
    """

    def __init__(self, about: str, why: str, channels: Sequence[Channel], counts: Mapping[str, int], rank: int) -> None:
        self._about, self._why, self._channels, self._rank = about, why, channels, rank
        self._counts = {channel.name: counts[channel.name] for channel in channels}
        self._groups = {channel.group: list(channel.group_ranks) for channel in channels}
        self._ledger, self._limit_s = Ledger(rank), min(channel.limit_s for channel in channels)

    def say(
        self,
        *,
        plan: tuple[Action, ...] = (),
        vetoes: Mapping[str, str] = _NOTHING,
        times: Mapping[str, float] = _NOTHING,
    ) -> Statement:
        """Publish this rank's statement under each of its channels."""
        mine = Statement(self._rank, dict(vetoes), plan, self._groups, self._counts, dict(times))
        for channel, count in self._counts.items():
            self._ledger.post(f"{self._about}/{channel}/{count}", mine.encode())
        return mine

    def hear(self, known: Iterable[Statement], asked: Sequence[tuple[str, int]] | None = None) -> list[bytes]:
        """Return what the members of all channels that some statements name have said."""
        topics = self._topics(known) if asked is None else asked
        alarms = _alarms(self._channels, self._rank)
        return self._ledger.wait(topics, self._limit_s, self._why, alarms=alarms)

    def everybody(self, mine: Statement) -> dict[int, Statement]:
        """Return the statements of all ranks that channels connect, however many channels lie between.

        Raises:
            WaitLimitError: One said nothing within the group's timeout.
            BrokenGroupError: One failed meanwhile.
        """
        known = {self._rank: mine}
        while topics := [(topic, rank) for topic, rank in self._topics(known.values()) if rank not in known]:
            said = self.hear((), topics)
            known.update({rank: Statement.decode(data) for (_, rank), data in zip(topics, said, strict=True)})
        return known

    def _topics(self, statements: Iterable[Statement]) -> list[tuple[str, int]]:
        """Return one topic for every rank that the statements' channels name."""
        found: dict[int, str] = {}
        for statement in statements:
            for name, count in statement.counts.items():
                for member in members_of(name, statement.groups):
                    found.setdefault(member, f"{self._about}/{name}/{count}")
        return [(topic, rank) for rank, topic in sorted(found.items())]


def share_times(
    channels: Sequence[Channel], counts: Mapping[str, int], rank: int
) -> Callable[[str, dict[str, float]], Callable[[], Mapping[int, dict[str, float]]]]:
    """Return how ranks tell each other their times for one kind of pair.

    Args:
        channels: What the pair communicates on.
        counts: The number of the kind's agreement on each channel.
        rank: This process's global rank.
    """
    peers = [channel for channel in channels if channel.has_peers]

    def share(number: str, times: dict[str, float]) -> Callable[[], Mapping[int, dict[str, float]]]:
        if not peers:
            return lambda: {rank: times}
        talk = Talk(f"times {number}", "to say how long its pairs took", peers, counts, rank)
        mine = talk.say(times=times)
        return lambda: {other: statement.times for other, statement in talk.everybody(mine).items()}

    return share


def _judge(known: dict[int, Statement]) -> dict[str, str]:
    """Run the plans of all connected ranks against each other."""
    groups = {name: ranks for statement in known.values() for name, ranks in statement.groups.items()}
    clash = disagreement({rank: statement.plan for rank, statement in known.items()}, groups)
    verdict = {}
    for strategy in known[min(known)].vetoes:
        vetoes = [
            f"on rank {rank}, {known[rank].vetoes[strategy]}" for rank in sorted(known) if known[rank].vetoes[strategy]
        ]
        verdict[strategy] = vetoes[0] if vetoes else clash
    return verdict


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
