"""From leased groups to what a step trains on: staleness checked, advantages computed, groups
without variance filtered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.api.weights import Group
from common.config import JobConfig
from services.trainer.algorithms import algorithm
from services.trainer.batching import Sequence


@dataclass
class Batch:
    """What a step trains on, group by group, and what its metrics say of it."""

    version: int  # that is being trained
    config: JobConfig
    sequences: list[Sequence] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    staleness: list[int] = field(
        default_factory=list
    )  # per group: trained version - lowest token version
    mixed: int = 0  # trajectories sampled by more than one version

    def add(self, group: Group) -> list[Sequence]:
        """The sequences of a group that train, in its order; none if it is filtered."""
        hooks = algorithm(self.config.algorithm.name)
        members = members_of(group)
        self.groups.append(group.group)
        self.staleness.append(staleness(group, self.version))
        self.mixed += sum(len(np.unique(s.versions[s.mask])) > 1 for s in members)
        self.lengths += [len(s.tokens) for s in members]
        rewards = group.rewards[np.isfinite(group.rewards)]
        self.rewards += rewards.tolist()
        advantages = hooks.advantages(rewards.astype(np.float64), self.config.algorithm)
        if advantages is None:
            self.filtered.append(group.group)
            return []
        for sequence, advantage in zip(members, advantages, strict=True):
            sequence.advantages = np.array(advantage, np.float32)
        trained = [sequence for sequence in members if sequence.trained]
        self.sequences += trained
        return trained

    @property
    def tokens(self) -> int:
        """All tokens of the sequences that are trained."""
        return sum(len(s.tokens) for s in self.sequences)

    def metrics(self) -> dict[str, Any]:
        return {
            "reward": float(np.mean(self.rewards)) if self.rewards else 0.0,
            "groups": len(self.groups),
            "filtered": len(self.filtered),
            "tokens": int(sum(self.lengths)),
            "tokens_trained": self.tokens,
            "sequences": len(self.sequences),
            "length_mean": float(np.mean(self.lengths)) if self.lengths else 0.0,
            "length_max": max(self.lengths, default=0),
            "staleness": float(np.mean(self.staleness)) if self.staleness else 0.0,
            "staleness_max": max(self.staleness, default=0),
            "mixed": self.mixed,
        }


def staleness(group: Group, version: int) -> int:
    """Versions that the oldest token the model sampled lies behind `version`."""
    sampled = group.versions[group.versions >= 0]
    return version - int(sampled.min()) if len(sampled) else 0


def members_of(group: Group) -> list[Sequence]:
    """The scored members of a group, in its order."""
    ends = np.cumsum(group.lengths)
    found = []
    scored = zip(ends, group.lengths, group.rewards, strict=True)
    for member, (end, length, reward) in enumerate(scored):
        if np.isfinite(reward):
            where = slice(int(end - length), int(end))
            versions = np.array(group.versions[where])
            found.append(
                Sequence(
                    tokens=np.array(group.tokens[where]),
                    logprobs=np.array(group.logprobs[where]),
                    mask=versions >= 0,
                    versions=versions,
                    group=group.group,
                    member=member,
                )
            )
    return found
