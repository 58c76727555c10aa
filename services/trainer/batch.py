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
    """The sequences of a step, and what its metrics say of them."""

    sequences: list[Sequence] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    staleness: list[int] = field(
        default_factory=list
    )  # per group: trained version - lowest token version
    mixed: int = 0  # trajectories sampled by more than one version

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


def assemble(groups: list[Group], version: int, config: JobConfig) -> Batch:
    """The batch that trains version `version`; a group's order is that of `groups`, a member's that
    in its group.
    """
    batch = Batch()
    hooks = algorithm(config.algorithm.name)
    for group in groups:
        batch.groups.append(group.group)
        members = _members(group)
        sampled = group.versions[group.versions >= 0]
        batch.staleness.append(version - int(sampled.min()) if len(sampled) else 0)
        batch.mixed += sum(len(np.unique(s.versions[s.mask])) > 1 for s in members)
        batch.lengths += [len(s.tokens) for s in members]
        rewards = group.rewards[np.isfinite(group.rewards)]
        batch.rewards += rewards.tolist()
        advantages = hooks.advantages(rewards.astype(np.float64), config.algorithm)
        if advantages is None:
            batch.filtered.append(group.group)
            continue
        for sequence, advantage in zip(members, advantages, strict=True):
            sequence.advantage = float(advantage)
            if sequence.mask[1:].any():
                batch.sequences.append(sequence)
    return batch


def _members(group: Group) -> list[Sequence]:
    """The scored members of a group."""
    ends = np.cumsum(group.lengths)
    found = []
    for end, length, reward in zip(ends, group.lengths, group.rewards, strict=True):
        if np.isfinite(reward):
            where = slice(int(end - length), int(end))
            versions = np.array(group.versions[where])
            found.append(
                Sequence(
                    tokens=np.array(group.tokens[where]),
                    logprobs=np.array(group.logprobs[where]),
                    mask=versions >= 0,
                    versions=versions,
                )
            )
    return found
