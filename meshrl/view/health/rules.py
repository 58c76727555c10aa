"""Rules of a run's health.

Each has its usual cause, and the job's keys to change. docs/use/health.md lists thresholds and
windows with their sources. A rule that lacks a number returns None: runs of earlier versions are
judged by the rules whose numbers they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshrl.view.health.case import Case, Verdict
from meshrl.view.health.signal_rules import (
    judge_end_tokens,
    judge_failures,
    judge_filtered_groups,
    judge_filtered_share,
    judge_reward,
    judge_reward_spread,
    judge_staleness,
    judge_truncation,
)
from meshrl.view.health.update_rules import (
    judge_gradient,
    judge_high_entropy,
    judge_kl,
    judge_learning_rate,
    judge_logprob_gap,
    judge_low_entropy,
    judge_weights,
)


@dataclass(frozen=True)
class Rule:
    """Rule by name, with its usual cause and the job's keys that remedy it.

    A finding is not shown beside one of the rules in `follows_from`, which explains it.
    """

    name: str
    judge: Callable[[Case], Verdict | None]
    cause: str
    keys: tuple[str, ...]
    follows_from: tuple[str, ...] = ()


RATE_KEYS = ("optimizer.adamw_lr", "optimizer.muon_lr")
# In the order in which findings are shown: causes before their consequences.
RULES: Sequence[Rule] = (
    Rule("learning_rate", judge_learning_rate, "the learning rate is too high", RATE_KEYS),
    Rule(
        "no_end_token",
        judge_end_tokens,
        "the model never samples a stop token, or rollout.max_tokens leaves no space for one",
        ("rollout.stop", "rollout.stop_text", "environment.chat", "rollout.max_tokens"),
    ),
    Rule(
        "truncated",
        judge_truncation,
        "answers are longer than the limit, or the model does not learn to end them",
        ("rollout.max_tokens", "rollout.stop", "algorithm.overlong_buffer"),
        ("no_end_token",),
    ),
    Rule(
        "failures",
        judge_failures,
        "a reward, a tool or the environment raises or exceeds its deadline; "
        "`meshrl samples RUN --failed` prints the errors",
        ("reward.use", "environment.use", "reward.deadline_s"),
    ),
    Rule(
        "all_filtered",
        judge_filtered_groups,
        "the rewards within each group are equal: tasks are all too hard or all solved",
        ("reward.use", "dataset.train", "algorithm.group_size"),
    ),
    Rule(
        "filtered_share",
        judge_filtered_share,
        "tasks are too hard or too easy: nearly all groups have equal rewards",
        ("dataset.train", "algorithm.group_size", "rollout.temperature"),
        ("learning_rate", "all_filtered"),
    ),
    Rule(
        "reward_spread",
        judge_reward_spread,
        "the reward does not tell the answers to one prompt apart",
        ("reward.use", "algorithm.group_size", "rollout.temperature"),
        ("learning_rate", "all_filtered"),
    ),
    Rule(
        "reward_constant",
        judge_reward,
        "the reward never leaves its floor: no answer is better than another",
        ("reward.use", "dataset.train", "warm_start.demonstrations"),
        ("all_filtered", "reward_spread"),
    ),
    Rule(
        "weights_unchanged",
        judge_weights,
        "the learning rate is too small, or all gradients were zero",
        RATE_KEYS,
        ("all_filtered", "reward_spread", "reward_constant", "learning_rate"),
    ),
    Rule(
        "gradient_norm",
        judge_gradient,
        "the learning rate is too high, or rewards are too large",
        (*RATE_KEYS, "optimizer.clip_norm"),
    ),
    Rule(
        "entropy_collapse",
        judge_low_entropy,
        "the policy has become deterministic: it explores nothing any more",
        (*RATE_KEYS, "algorithm.clip_high", "algorithm.entropy_coefficient"),
    ),
    Rule(
        "entropy_explosion",
        judge_high_entropy,
        "updates make the policy random: the rate is too high, or the data too stale",
        (*RATE_KEYS, "algorithm.max_staleness", "algorithm.entropy_coefficient"),
    ),
    Rule(
        "logprob_gap",
        judge_logprob_gap,
        "the engine computes with another precision or model than the trainer",
        ("rollout.dtype", "rollout.engine", "algorithm.correction"),
    ),
    Rule(
        "kl",
        judge_kl,
        "updates are too large, or the sampled data too stale",
        (*RATE_KEYS, "algorithm.max_staleness"),
    ),
    Rule(
        "staleness",
        judge_staleness,
        "training is faster than generation, or a version takes long to reach engines",
        ("algorithm.max_staleness", "mesh.workers"),
    ),
)
