"""Live groups of environments by what they are: a cache that saves replays and changes nothing else."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from gradserve.compute.engine.control.environments import Anchors, Group, MakeGroup, make_group
from gradserve.wire.control import EnvSpec


class LiveGroups:
    """At most ``capacity`` groups, the least recently kept closed first. A group is taken out while it steps.

    ``make`` makes those that are not here.
    """

    def __init__(self, capacity: int = 64, make: MakeGroup = make_group) -> None:
        self._capacity = capacity
        self._make = make
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self.replayed_steps = 0
        """Steps of streams that were played again, for whoever tunes the capacity."""

    def take(self, env: EnvSpec, seed: int, members: range, anchors: Anchors | None) -> Group:
        """The group at ``anchors`` (None: before its first step), live or brought there by replay."""
        live = self._groups.pop(_key(env, seed, members, anchors), None) if anchors is not None else None
        if live is not None:
            return live
        group = self._make(env, seed, members)
        anchors = anchors or Anchors.fresh(group.streams, group.width)
        group.restore(anchors)
        self.replayed_steps += int(anchors.lengths.sum())
        return group

    def keep(self, env: EnvSpec, seed: int, members: range, anchors: Anchors, group: Group) -> None:
        """Hand back a group that is at ``anchors``."""
        self._groups[_key(env, seed, members, anchors)] = group
        while len(self._groups) > self._capacity:
            self._groups.popitem(last=False)[1].close()

    def close(self) -> None:
        """Close all."""
        while self._groups:
            self._groups.popitem()[1].close()


def _key(env: EnvSpec, seed: int, members: range, anchors: Anchors) -> str:
    digest = hashlib.sha256(msgspec.json.encode([env, seed, members.start, len(members)], order="deterministic"))
    for array in (anchors.episodes, anchors.lengths, anchors.actions):
        digest.update(array.tobytes())
    return digest.hexdigest()
