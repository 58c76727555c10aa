"""Batch of a step, made from leased groups: staleness, advantages, filters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.errors import BadMessage, ConfigError
from meshrl.common.base.lineages import compute_ages
from meshrl.common.job.config import JobConfig
from meshrl.common.job.prompt_order import PromptMix
from meshrl.services.trainer.algorithms import get_algorithm, has_refill
from meshrl.services.trainer.bins.packing import TrainingSequence
from meshrl.services.trainer.learner.aggregation import compute_token_weight
from meshrl.services.trainer.losses.shaping import (
    compute_divergences,
    compute_overlong_penalty,
    is_kl_in_reward,
)

MAX_REFILLS_PER_GROUP = 10  # groups replaced in a step, per group of its batch
# Arrays that losses may use, by name -> their fields in a group.
EXTRA_FIELDS = {"reference": "reference_logprobs", "teacher": "teacher_logprobs"}
MAX_STEP_METRICS = 256  # names of rewards' metrics in a step's row
SOURCE_REWARDS = "reward_by_source"  # metric of jobs that mix datasets
MAX_REWARD = 1e100  # above, sums of squares overflow float64
MAX_ADVANTAGE = 1e15  # above, squares of gradients overflow float32, whose largest is 3e38


@dataclass
class StepBatch:
    """Training data of a step by group, and the counters of its metrics."""

    version: int  # version being trained
    config: JobConfig
    sequences: list[TrainingSequence] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    filtered_ids: list[int] = field(default_factory=list)
    refilled_count: int = 0  # groups that were filtered earlier, and replaced
    rewards: list[float] = field(default_factory=list)
    # of jobs that mix datasets, by their sources
    source_rewards: dict[str, list[float]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    reward_deviations: list[float] = field(default_factory=list)  # per group
    # per group: trained version - lowest token version
    group_staleness: list[int] = field(default_factory=list)
    # trained tokens, by their own staleness
    token_staleness: Counter[int] = field(default_factory=Counter)
    mixed_count: int = 0  # trajectories sampled by more than one version
    turn_count: int = 0  # runs of sampled tokens
    truncated_count: int = 0  # trajectories cut off at the maximum length
    metric_values: dict[str, list[float]] = field(default_factory=dict)  # of scored trajectories
    masked_count: int = 0  # those of them that `mask_truncated` masks, also in filtered groups

    def add(self, group: TrajectoryGroup) -> list[TrainingSequence]:
        """Add a group; return its sequences that train, in order, or none if it is filtered."""
        members = build_sequences(group)
        self.group_ids.append(group.group)
        self.group_staleness.append(compute_staleness(group, self.version))
        self.mixed_count += sum(len(np.unique(s.versions[s.loss_mask])) > 1 for s in members)
        self.lengths += [len(s.tokens) for s in members]
        self.truncated_count += sum(s.is_truncated for s in members)
        self.turn_count += sum(count_turns(s.loss_mask) for s in members)
        rewards = select_scored_rewards(group)
        self.rewards += rewards.tolist()
        for name, values in zip(group.metric_names, group.metrics.T, strict=True):
            found = values[np.isfinite(group.rewards) & np.isfinite(values)]
            self.metric_values.setdefault(name, []).extend(found.tolist())
        if names := self._source_names:
            name = names[PromptMix.from_job(self.config).find_source(group.prompt)]
            self.source_rewards.setdefault(name, []).extend(rewards.tolist())
        left_out = [is_masked(sequence, self.config) for sequence in members]
        self.masked_count += sum(left_out)
        advantages = compute_advantages(members, rewards, self.config)
        self.reward_deviations.append(
            float(rewards.std()) if len(set(rewards.tolist())) > 1 else 0.0
        )
        if advantages is None:
            self.filtered_ids.append(group.group)
            return []
        for sequence, advantage in zip(members, advantages, strict=True):
            sequence.advantages = np.array(advantage, np.float64)  # float32 from the bin on
            sequence.weight = compute_token_weight(sequence.loss_token_count, self.config)
        learned = zip(members, left_out, strict=True)
        trained = [sequence for sequence, out in learned if sequence.loss_token_count and not out]
        for sequence in trained:
            versions = sequence.versions[sequence.loss_mask]
            ages = compute_ages(versions, sequence.abandoned_above, self.version)
            self.token_staleness += Counter(ages.tolist())
        self.sequences += trained
        return trained

    @property
    def _source_names(self) -> list[str]:
        """Names of the sources of `dataset.mix`, from their files in the bundle."""
        paths = (PurePath(source.path) for source in self.config.dataset.mix)
        return [path.stem.removeprefix("mix-") for path in paths]

    @property
    def token_count(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)

    def build_metrics(self) -> dict[str, Any]:
        looked_at = max(1, len(self.group_ids) + self.refilled_count)
        longest = max(self.config.algorithm.max_staleness, *self.token_staleness, 0)
        return (
            {
                "reward": float(np.mean(self.rewards)) if self.rewards else 0.0,
                "groups": len(self.group_ids),
                "filtered": len(self.filtered_ids),
                "refilled": self.refilled_count,
                "filtered_share": (len(self.filtered_ids) + self.refilled_count) / looked_at,
                "reward_spread": float(np.mean(self.reward_deviations))
                if self.reward_deviations
                else 0.0,
                "tokens": int(sum(self.lengths)),
                "tokens_trained": self.token_count,
                "sequences": len(self.sequences),
                "length_mean": float(np.mean(self.lengths)) if self.lengths else 0.0,
                "length_max": max(self.lengths, default=0),
                "turns": self.turn_count / max(1, len(self.lengths)),
                "staleness": float(np.mean(self.group_staleness)) if self.group_staleness else 0.0,
                "staleness_max": max(self.group_staleness, default=0),
                # trained tokens by staleness: 0, 1, .. up to `max_staleness`
                "staleness_tokens": [self.token_staleness[lag] for lag in range(longest + 1)],
                "mixed": self.mixed_count,
                "truncated": self.truncated_count,
                "masked": self.masked_count,
            }
            | average_metrics(self.metric_values)
            | self._average_by_source()
        )

    def _average_by_source(self) -> dict[str, Any]:
        found = {name: float(np.mean(values)) for name, values in self.source_rewards.items()}
        return {SOURCE_REWARDS: found} if found else {}


def count_turns(loss_mask: NDArray[np.bool_]) -> int:
    """Return the number of runs of sampled tokens in a sequence's mask, bool [tokens]."""
    return int(loss_mask[:1].sum() + (loss_mask[1:] & ~loss_mask[:-1]).sum())


def average_metrics(values: dict[str, list[float]]) -> dict[str, float]:
    """Return the mean of each metric; of too many names, those with the most values."""
    names = sorted(values, key=lambda name: (-len(values[name]), name))[:MAX_STEP_METRICS]
    return {name: float(np.mean(values[name])) for name in sorted(names) if values[name]}


def compute_advantages(
    members: list[TrainingSequence], rewards: NDArray[np.float64], config: JobConfig
) -> NDArray[np.float64] | None:
    """Return one advantage for each member from shaped rewards; None if the group is filtered.

    The length penalty counts when a group is checked for a learning signal, but not in dynamic
    sampling, which needs some right and some wrong answers (DAPO, equation 11). The KL penalty
    never counts: that of two trajectories is never equal. Masked members still count in the group's
    baseline.
    """
    if all(is_masked(sequence, config) for sequence in members):  # also if there are none
        return None
    hooks, chosen = get_algorithm(config.algorithm.name), config.algorithm
    _reject_above(MAX_REWARD, "rewards", rewards, members, rewards)
    lengths = np.array([len(sequence.tokens) for sequence in members], np.int64)
    shaped = rewards + compute_overlong_penalty(lengths, hooks.overlong_share, config)
    if hooks.compute_advantages(rewards if has_refill(chosen) else shaped, chosen) is None:
        return None
    if hooks.prepare_advantages is None and is_kl_in_reward(chosen):
        paid = [chosen.kl_coefficient * compute_divergences(one, chosen).sum() for one in members]
        shaped = shaped - paid
    found = hooks.compute_advantages(shaped, replace(chosen, filter_zero_variance=False))
    # Other advantages are normalised later.
    if found is not None and (hooks.prepare_advantages is None or hooks.has_critic):
        _reject_above(MAX_ADVANTAGE, "advantages", found, members, rewards)
    return found


def _reject_above(
    maximum: float,
    quantity: str,
    values: NDArray[np.float64],
    members: list[TrainingSequence],
    rewards: NDArray[np.float64],
) -> None:
    """Raise ConfigError with the group's rewards if values are too large to train on."""
    if (np.abs(values) <= maximum).all():
        return
    raise ConfigError(
        f"the rewards of group {members[0].group_id} go from {rewards.min():g} to "
        f"{rewards.max():g}: "
        f"{quantity} above {maximum:g} make gradients that are not finite",
        where="reward",
        fix="Divide what the reward returns, so that rewards are around 1",
    )


def is_masked(sequence: TrainingSequence, config: JobConfig) -> bool:
    """Return True if the job masks this trajectory because it was truncated."""
    return config.algorithm.mask_truncated and sequence.is_truncated


def has_no_signal(group: TrajectoryGroup, config: JobConfig) -> bool:
    return compute_advantages(build_sequences(group), select_scored_rewards(group), config) is None


class RefillPolicy:
    """Dynamic sampling (DAPO): policy of which groups of one step are replaced by others."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        is_refilling = has_refill(config.algorithm)
        self._max_count = (
            MAX_REFILLS_PER_GROUP * config.algorithm.groups_per_step if is_refilling else 0
        )
        self.replaced_count = 0  # groups replaced so far

    def try_replace(self, group: TrajectoryGroup) -> bool:
        """Return True, and count it, if the group has no learning signal and may be replaced."""
        if self.replaced_count >= self._max_count or not has_no_signal(group, self._config):
            return False
        self.replaced_count += 1
        return True


def select_scored_rewards(group: TrajectoryGroup) -> NDArray[np.float64]:
    return group.rewards[np.isfinite(group.rewards)].astype(np.float64)


def compute_staleness(group: TrajectoryGroup, version: int) -> int:
    """Return the number of versions that the oldest sampled token is behind `version`."""
    ages = compute_ages(group.sampled_versions, group.abandoned_above, version)
    return int(ages.max()) if len(ages) else 0


def build_sequences(group: TrajectoryGroup) -> list[TrainingSequence]:
    """Return the scored members of a group in order; BadMessage if its arrays are inconsistent."""
    group = validate_group(group)
    ends = np.cumsum(group.lengths)
    extras = _get_extras(group)
    experts = _reshape_expert_ids(group)
    found = []
    scored = zip(ends, group.lengths, group.rewards, strict=True)
    truncated = group.truncated if len(group.truncated) else np.zeros(len(group.lengths), np.bool_)
    for member, (end, length, reward) in enumerate(scored):
        if np.isfinite(reward):
            where = slice(int(end - length), int(end))
            versions = np.array(group.versions[where])
            found.append(
                TrainingSequence(
                    tokens=np.array(group.tokens[where]),
                    logprobs=np.array(group.logprobs[where]),
                    loss_mask=versions >= 0,
                    versions=versions,
                    extras={name: np.array(array[where]) for name, array in extras.items()},
                    expert_ids=None if experts is None else np.array(experts[where]),
                    group_id=group.group,
                    member_index=member,
                    abandoned_above=group.abandoned_above,
                    is_truncated=bool(truncated[member]),
                )
            )
    return found


def validate_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return the group; raise BadMessage if its arrays are inconsistent."""
    lengths, tokens, unfit = group.lengths, group.tokens, ""
    members = f"{len(lengths)} members"
    if group.rewards.shape != lengths.shape:
        unfit = f"{members} and {len(group.rewards)} rewards"
    elif len(group.truncated) and group.truncated.shape != lengths.shape:
        unfit = f"{members} and {len(group.truncated)} truncation flags"
    elif group.metric_names and group.metrics.shape != (len(lengths), len(group.metric_names)):
        unfit = f"{members} and metrics of shape {list(group.metrics.shape)}"
    elif (lengths < 0).any() or tokens.shape != (int(lengths.sum()),):
        unfit = (
            f"{len(tokens)} tokens, and the lengths of its members add up to {int(lengths.sum())}"
        )
    arrays = {"logprobs": group.logprobs, "versions": group.versions} | _get_extras(group)
    for name, array in () if unfit else arrays.items():
        if array.shape != tokens.shape:
            unfit = unfit or f"{len(tokens)} tokens and {len(array)} of {name}"
    if unfit:
        raise BadMessage(f"group {group.group} has {unfit}")
    _reshape_expert_ids(group)
    return group


def _get_extras(group: TrajectoryGroup) -> dict[str, NDArray[np.float32]]:
    """Return the arrays that losses may use, by name, of those that the group has."""
    found = {name: getattr(group, at) for name, at in EXTRA_FIELDS.items()}
    return {name: array for name, array in found.items() if len(array)}


def _reshape_expert_ids(group: TrajectoryGroup) -> NDArray[np.int16] | None:
    """Return the expert ids [tokens, layers, k]; None for a dense model's group."""
    if not group.expert_ids.size:
        return None
    shape = len(group.tokens), *group.expert_shape
    if group.expert_ids.shape != (shape[0], shape[1] * shape[2]):
        raise BadMessage(
            f"group {group.group} has experts {list(group.expert_ids.shape)}, not {list(shape)}"
        )
    return group.expert_ids.reshape(shape)
