"""Which keys of a job may change while a run stands still, and what of a change a replay needs.

A step is repeated with what it was done with: values of keys that are `recorded` stand in its
record. The others that may change decide nothing of what a step computes from its groups, or, as
`training.ranks`, leave the steps since the checkpoint to a new lineage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from meshrl.common.job.config import JobConfig


@dataclass(frozen=True)
class Rule:
    """Whether a key may change."""

    fixed: str = ""  # why it may not; empty: it may
    recorded: bool = False  # whether a replay of a step needs the value that it was done with


FREE = Rule()
RECORDED = Rule(recorded=True)


def _fixed(why: str) -> Rule:
    return Rule(fixed=why)


_UNDER_WAY = _fixed("trajectories that are under way were begun with it")
_BUNDLED = _fixed("the run holds copies of the files that it began with")

# By key or table; the longest name that fits decides, so that a key of a table that is not named
# has the table's rule.
RULES: dict[str, Rule] = {
    "name": _fixed("the run is known by it, in Redis and in its trackers"),
    "out": _fixed("the run lies there"),
    "seed": _fixed("what was drawn with it cannot be drawn again"),
    "cache": FREE,
    "mesh": FREE,
    "model": _fixed("the weights that the run has trained are of this model"),
    "models": _fixed("trajectories that are under way carry its scores"),
    "dataset": _BUNDLED,
    "environment": _BUNDLED,
    "environment.processes": FREE,
    "environment.threads": FREE,
    "environment.python": FREE,
    "environment.tool_deadline_s": FREE,
    "environment.step_deadline_s": FREE,
    "reward": _fixed("rewards from before and after could not be compared"),
    "reward.deadline_s": FREE,
    "reward.judge.key": FREE,
    "reward.judge.in_flight": FREE,
    "reward.judge.deadline_s": FREE,
    "reward.judge.patience_s": FREE,
    "sandbox": FREE,
    "rollout": _UNDER_WAY,
    "rollout.engine": FREE,
    "rollout.path": FREE,
    "rollout.dtype": FREE,
    "rollout.kv_tokens": FREE,
    "rollout.kv_on_update": FREE,
    "rollout.shards": _fixed("trajectories that are under way lie in the ledgers of its shards"),
    "rollout.slots": FREE,
    "rollout.max_turns": FREE,
    "rollout.sglang_python": FREE,
    "rollout.sglang_options": FREE,
    "rollout.sglang_weights": FREE,
    "rollout.weights": FREE,
    "rollout.broadcast": FREE,
    "rollout.kv": FREE,
    "rollout.read_back": FREE,
    "rollout.buckets": FREE,
    "rollout.pace": FREE,
    "rollout.tensor_parallel": FREE,
    "algorithm": RECORDED,
    "algorithm.name": _fixed("the optimizer's state and the groups under way are this algorithm's"),
    "algorithm.group_size": _fixed("groups that are under way are of this size"),
    "algorithm.groups_per_step": _fixed("the groups that were admitted are counted by it"),
    "algorithm.min_group": FREE,
    "algorithm.max_staleness": FREE,
    "lora": _fixed("the adapters that the run has trained are of this shape"),
    "optimizer": RECORDED,
    "training": FREE,
    "training.bin_tokens": RECORDED,
    "weights": FREE,
    "warm_start": _fixed("version 0 is made"),
    "evaluation": FREE,
    "evaluation.before": _fixed("version 0 is behind the run"),
    "evaluation.datasets": _BUNDLED,
    "evaluation.best": _fixed("the best version so far was judged by it"),
    "budget": RECORDED,
    "tracking": FREE,
    "planner": FREE,
    "pool": FREE,
}
# Zero is more than a value there: it decides what there is.
NOT_ACROSS_ZERO = {
    "optimizer.muon_lr": "at 0 AdamW trains the matrices, and each optimizer has its own state",
    "algorithm.kl_coefficient": "groups that are under way carry a reference's scores, or none",
}


def rule_of(key: str) -> Rule:
    """The rule of a dotted key; KeyError if there is no such table."""
    while key not in RULES:
        key, dot, _ = key.rpartition(".")
        if not dot:
            raise KeyError(key)
    return RULES[key]


def refusal(key: str, was: Any, now: Any) -> str:
    """Why a key may not change so; empty: it may."""
    if rule := rule_of(key).fixed:
        return rule
    if (why := NOT_ACROSS_ZERO.get(key)) and (was == 0) != (now == 0):
        return f"neither from 0 nor to it: {why}"
    return ""


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two documents differ, with both values; None: it has none."""
    before, after = dict(flat(was)), dict(flat(now))
    keys = dict.fromkeys([*before, *after])
    both = {key: (before.get(key), after.get(key)) for key in keys}
    return {key: (old, new) for key, (old, new) in both.items() if old != new}


def flat(document: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all values of a document; a list is one value."""
    for name, value in document.items():
        key = f"{within}.{name}" if within else name
        if isinstance(value, dict):
            yield from flat(value, key)
        else:
            yield key, value


def in_force(config: JobConfig) -> dict[str, Any]:
    """What a replay of a step that is done with `config` needs of it: values by dotted key."""
    return {key: value for key, value in flat(config.document()) if rule_of(key).recorded}


def as_it_was(config: JobConfig, settings: Mapping[str, Any]) -> JobConfig:
    """The job with what was in force when a step was done, as `in_force` gave it."""
    if not settings or in_force(config) == settings:
        return config
    return JobConfig.from_document(changed(config.document(), settings))


def changed(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a document with other values, by dotted key."""
    copy = deepcopy(dict(document))
    for key, value in values.items():
        *tables, last = key.split(".")
        place = copy
        for table in tables:
            place = place[table]
        place[last] = value
    return copy
