"""IDEA: a channel is what the backend keeps in order: a process group, or one direction between two of its ranks."""

from __future__ import annotations

import datetime
import weakref
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

ProcessGroup: TypeAlias = dist.ProcessGroup


class Channel:
    """Operations that a backend pairs with those of other ranks by their order.

    Args:
        name: The group's name, or `group:source>destination` (global ranks).
        group: The process group.
        members: Global ranks that take part.
    """

    def __init__(self, name: str, group: ProcessGroup, members: tuple[int, ...]) -> None:
        self.name, self.members = name, members
        self.group = str(group.group_name)
        self.group_ranks = tuple(dist.get_process_group_ranks(group))
        self.limit_s = group_timeout_s(group)
        self.broken = ""
        self.num_pairs = 0
        self.num_agreements = 0
        self._num_known_pairs = 0
        self._process_group = weakref.ref(group)

    @property
    def has_peers(self) -> bool:
        """Whether another rank takes part."""
        return len(self.members) > 1

    def sequence_number(self) -> int:
        """Return how many operations the group has issued, whoever did; 0 where its backend does not count."""
        group: Any = self._process_group()
        try:
            return int(group._get_sequence_number_for_group()) if group is not None else 0
        except RuntimeError:
            return 0

    def is_of(self, group: ProcessGroup) -> bool:
        """Whether this channel is of that very group, and not of an earlier one of the same name."""
        return self._process_group() is group

    def is_alive(self) -> bool:
        """Whether the group has not been destroyed."""
        group = self._process_group()
        return group is not None and group in dist.distributed_c10d._world.pg_map

    def next_agreement(self) -> int:
        """Return the number of the agreement that begins, the same on every member."""
        self.num_agreements += 1
        return self.num_agreements

    def next_known_pair(self) -> int:
        """Return the number of the pair that begins, among those whose kind is known; the same on every member."""
        self._num_known_pairs += 1
        return self._num_known_pairs


class Channels:
    """All channels of one process, found by group and, for point-to-point operations, by its ends.

    Attributes:
        lone_groups_are_slow: Whether groups of one rank take turns too, as under a simulated link.
    """

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = {}
        # by the identity of a group, which costs less to ask for than its name; one that is gone is no hit
        self._known: dict[int, Channel] = {}
        self.lone_groups_are_slow = False

    def of_group(self, group: ProcessGroup) -> Channel:
        """Return the channel of a group's collectives."""
        channel = self._known.get(id(group))
        if channel is not None and channel.is_of(group):
            return channel
        name = group.group_name
        channel = self._channels.get(name)
        if channel is None or not channel.is_of(group):
            members = tuple(dist.get_process_group_ranks(group))
            channel = self._keep(Channel(name, group, members))
        self._known[id(group)] = channel
        return channel

    def of_ends(self, group: ProcessGroup, source: int, destination: int) -> Channel:
        """Return the channel from one rank of a group to another (ranks within the group)."""
        ranks = self.of_group(group).group_ranks
        name = f"{group.group_name}:{ranks[source]}>{ranks[destination]}"
        channel = self._channels.get(name)
        if channel is None or not channel.is_of(group):
            members = tuple(sorted({ranks[source], ranks[destination]}))
            channel = self._keep(Channel(name, group, members))
        return channel

    def takes_turns(self, channel: Channel) -> bool:
        """Whether waiting for this channel is worth a turn: groups of one have nothing to hide."""
        return channel.has_peers or self.lone_groups_are_slow

    def _keep(self, channel: Channel) -> Channel:
        # a group that was made anew counts from the beginning: its members may have stopped at different counts, and
        # c10d itself needs a fresh store, or a fresh name, for it
        self._channels[channel.name] = channel
        return channel


def group_timeout_s(group: ProcessGroup) -> float:
    """Return a process group's timeout in seconds: the limit of everything that waits for its members."""
    default = datetime.timedelta(minutes=30)
    for device in ("cuda", "cpu"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (RuntimeError, AttributeError, NotImplementedError):
            continue  # no backend for that device, or one without options
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout.total_seconds()
    return default.total_seconds()
