"""Makes the batch of a step from leased groups: staleness, advantages, filters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.weights import Group
from meshrl.common.base.errors import BadMessage, ConfigError
from meshrl.common.base.lineages import counted
from meshrl.common.job.config import JobConfig
from meshrl.services.trainer.algorithms import algorithm, refills
from meshrl.services.trainer.arithmetic.aggregation import token_weight
from meshrl.services.trainer.bins.packing import Sequence
from meshrl.services.trainer.losses.shaping import divergences, kl_in_reward, overlong

REFILLS = 10  # groups replaced in a step, per group that it takes, before it takes what there is
EXTRAS = ("reference", "teacher")  # arrays of a group that losses may ask for
LARGEST_REWARD = 1e100  # above, float64 has no room for sums of squares
LARGEST_ADVANTAGE = 1e15  # above, squares of gradients overflow float32, whose largest is 3e38


@dataclass
class Batch:
    """What a step trains on, group by group, and what its metrics say of it."""

    version: int  # version that is being trained
    config: JobConfig
    sequences: list[Sequence] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)
    refilled: int = 0  # groups that were filtered before, and replaced
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)  # per group: deviation of its rewards
    # per group: trained version - lowest token version
    staleness: list[int] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)  # trained tokens, by their own staleness
    mixed: int = 0  # trajectories sampled by more than one version
    truncated: int = 0  # trajectories that were cut off at the longest length
    masked: int = 0  # those among them that `mask_truncated` leaves out, of filtered groups too

    def add(self, group: Group) -> list[Sequence]:
        """The sequences of a group that train, in its order; none if it is filtered."""
        members = members_of(group)
        self.groups.append(group.group)
        self.staleness.append(staleness(group, self.version))
        self.mixed += sum(len(np.unique(s.versions[s.mask])) > 1 for s in members)
        self.lengths += [len(s.tokens) for s in members]
        self.truncated += sum(s.truncated for s in members)
        rewards = scored_rewards(group)
        self.rewards += rewards.tolist()
        left_out = [masked(sequence, self.config) for sequence in members]
        self.masked += sum(left_out)
        advantages = advantages_of(members, rewards, self.config)
        self.spreads.append(float(rewards.std()) if len(set(rewards.tolist())) > 1 else 0.0)
        if advantages is None:
            self.filtered.append(group.group)
            return []
        for sequence, advantage in zip(members, advantages, strict=True):
            sequence.advantages = np.array(advantage, np.float64)  # float32 from the bin on
            sequence.weight = token_weight(sequence.trained, self.config)
        learned = zip(members, left_out, strict=True)
        trained = [sequence for sequence, out in learned if sequence.trained and not out]
        for sequence in trained:
            versions = counted(sequence.versions[sequence.mask], sequence.foreign_above)
            self.lags += Counter((self.version - versions).tolist())
        self.sequences += trained
        return trained

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)

    def metrics(self) -> dict[str, Any]:
        looked_at = max(1, len(self.groups) + self.refilled)
        longest = max(self.config.algorithm.max_staleness, *self.lags, 0)
        return {
            "reward": float(np.mean(self.rewards)) if self.rewards else 0.0,
            "groups": len(self.groups),
            "filtered": len(self.filtered),
            "refilled": self.refilled,
            "filtered_share": (len(self.filtered) + self.refilled) / looked_at,
            "reward_spread": float(np.mean(self.spreads)) if self.spreads else 0.0,
            "tokens": int(sum(self.lengths)),
            "tokens_trained": self.tokens,
            "sequences": len(self.sequences),
            "length_mean": float(np.mean(self.lengths)) if self.lengths else 0.0,
            "length_max": max(self.lengths, default=0),
            "staleness": float(np.mean(self.staleness)) if self.staleness else 0.0,
            "staleness_max": max(self.staleness, default=0),
            # trained tokens by the versions that they lie behind: 0, 1, .. up to `max_staleness`
            "staleness_tokens": [self.lags[lag] for lag in range(longest + 1)],
            "mixed": self.mixed,
            "truncated": self.truncated,
            "masked": self.masked,
        }


def advantages_of(
    members: list[Sequence], rewards: NDArray[np.float64], config: JobConfig
) -> NDArray[np.float64] | None:
    """One for each member of a group, from rewards as they are shaped; None: it is filtered.

    Length counts when a group is judged to have nothing to teach, but not in dynamic sampling,
    which asks for some right and some wrong answers (DAPO, equation 11). Divergence never does:
    that of two trajectories is never equal. What is masked still counts in the group's baseline.
    """
    if all(masked(sequence, config) for sequence in members):  # or there are none
        return None
    hooks, chosen = algorithm(config.algorithm.name), config.algorithm
    _refuse_above(LARGEST_REWARD, "rewards", rewards, members, rewards)
    lengths = np.array([len(sequence.tokens) for sequence in members], np.int64)
    shaped = rewards + overlong(lengths, hooks.overlong_share, config)
    if hooks.advantages(rewards if refills(chosen) else shaped, chosen) is None:
        return None
    if hooks.prepare is None and kl_in_reward(chosen):
        paid = [chosen.kl_coefficient * divergences(one, chosen).sum() for one in members]
        shaped = shaped - paid
    found = hooks.advantages(shaped, replace(chosen, filter_zero_variance=False))
    if found is not None and (hooks.prepare is None or hooks.critic):  # else they are normalised
        _refuse_above(LARGEST_ADVANTAGE, "advantages", found, members, rewards)
    return found


def _refuse_above(
    largest: float,
    what: str,
    values: NDArray[np.float64],
    members: list[Sequence],
    rewards: NDArray[np.float64],
) -> None:
    """Raise ConfigError, which names a group's rewards, for values too large to train on."""
    if (np.abs(values) <= largest).all():
        return
    raise ConfigError(
        f"the rewards of group {members[0].group} go from {rewards.min():g} to {rewards.max():g}: "
        f"{what} above {largest:g} make gradients that are not finite",
        where="reward",
        fix="divide what the reward returns, so that rewards are around 1",
    )


def masked(sequence: Sequence, config: JobConfig) -> bool:
    """Whether the job leaves the trajectory out of the loss because it was cut off."""
    return config.algorithm.mask_truncated and sequence.truncated


def teaches_nothing(group: Group, config: JobConfig) -> bool:
    return advantages_of(members_of(group), scored_rewards(group), config) is None


class Refill:
    """Dynamic sampling (DAPO): which groups of one step give their place to others."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        wanted = refills(config.algorithm)
        self._most = REFILLS * config.algorithm.groups_per_step if wanted else 0
        self.count = 0  # groups that did

    def replaces(self, group: Group) -> bool:
        """Whether the group has nothing to teach and may be replaced; counts it if so."""
        if self.count >= self._most or not teaches_nothing(group, self._config):
            return False
        self.count += 1
        return True


def scored_rewards(group: Group) -> NDArray[np.float64]:
    return group.rewards[np.isfinite(group.rewards)].astype(np.float64)


def staleness(group: Group, version: int) -> int:
    """Versions that the oldest token that would be trained lies behind `version`."""
    sampled = counted(group.sampled_versions, group.foreign_above)
    return version - int(sampled.min()) if len(sampled) else 0


def members_of(group: Group) -> list[Sequence]:
    """The scored members of a group, in its order; BadMessage if its arrays do not fit together."""
    group = whole(group)
    ends = np.cumsum(group.lengths)
    extras = {name: getattr(group, name) for name in EXTRAS if len(getattr(group, name))}
    experts = _experts(group)
    found = []
    scored = zip(ends, group.lengths, group.rewards, strict=True)
    truncated = group.truncated if len(group.truncated) else np.zeros(len(group.lengths), np.bool_)
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
                    extras={name: np.array(array[where]) for name, array in extras.items()},
                    experts=None if experts is None else np.array(experts[where]),
                    group=group.group,
                    member=member,
                    foreign_above=group.foreign_above,
                    truncated=bool(truncated[member]),
                )
            )
    return found


def whole(group: Group) -> Group:
    """The group; BadMessage if its arrays do not fit together."""
    lengths, tokens, unfit = group.lengths, group.tokens, ""
    members = f"{len(lengths)} members"
    if group.rewards.shape != lengths.shape:
        unfit = f"{members} and {len(group.rewards)} rewards"
    elif len(group.truncated) and group.truncated.shape != lengths.shape:
        unfit = f"{members} and {len(group.truncated)} endings"
    elif (lengths < 0).any() or tokens.shape != (int(lengths.sum()),):
        unfit = f"{len(tokens)} tokens, and members of {int(lengths.sum())}"
    for name in () if unfit else ("logprobs", "versions", *EXTRAS):
        array = getattr(group, name)
        if array.shape != tokens.shape and (len(array) or name not in EXTRAS):
            unfit = unfit or f"{len(tokens)} tokens and {len(array)} of {name}"
    if unfit:
        raise BadMessage(f"group {group.group} has {unfit}")
    _experts(group)
    return group


def _experts(group: Group) -> NDArray[np.int16] | None:
    """[tokens, layers, k]; None: a dense model's group."""
    if not group.experts.size:
        return None
    shape = len(group.tokens), *group.expert_shape
    if group.experts.shape != (shape[0], shape[1] * shape[2]):
        raise BadMessage(
            f"group {group.group} has experts {list(group.experts.shape)}, not {list(shape)}"
        )
    return group.experts.reshape(shape)
