"""Rules for changes to the keys of a stopped job, and the keys that a replay needs.

A step is replayed with its original settings: the values of recorded keys are in its record. The
other changeable keys do not affect a step's result for its groups. Or, like `training.ranks`, they
leave the steps since the checkpoint to a new lineage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from meshrl.common.job.config import JobConfig


@dataclass(frozen=True)
class ChangeRule:
    """Rule for changes to a key."""

    fixed_reason: str = ""  # why the key may not change; empty: it may
    is_recorded: bool = False  # True if a replay of a step needs its original value


CHANGEABLE = ChangeRule()
RECORDED = ChangeRule(is_recorded=True)


def _fixed_rule(reason: str) -> ChangeRule:
    return ChangeRule(fixed_reason=reason)


_IN_FLIGHT = _fixed_rule("trajectories in flight started with its present value")
_BUNDLED = _fixed_rule("the run uses copies of its original files")

# By key or table. The longest matching name decides: a key without an entry has its table's rule.
RULES: dict[str, ChangeRule] = {
    "name": _fixed_rule("the name identifies the run in Redis and in the trackers"),
    "out": _fixed_rule("the run's files are in that directory"),
    "seed": _fixed_rule("random draws made with it cannot be repeated"),
    "cache": CHANGEABLE,
    "mesh": CHANGEABLE,
    "model": _fixed_rule("the trained weights belong to this model"),
    "models": _fixed_rule("trajectories in flight carry scores of this model"),
    "dataset": _BUNDLED,
    "dataset.shuffle": _fixed_rule("the run would repeat some rows of an epoch and skip others"),
    "dataset.epochs": _fixed_rule("budget.steps has the steps of its epochs; change that key"),
    "environment": _BUNDLED,
    "environment.processes": CHANGEABLE,
    "environment.threads": CHANGEABLE,
    "environment.python": CHANGEABLE,
    "environment.tool_deadline_s": CHANGEABLE,
    "environment.step_deadline_s": CHANGEABLE,
    "reward": _fixed_rule("rewards before and after a change are not comparable"),
    "reward.deadline_s": CHANGEABLE,
    "reward.judge.key": CHANGEABLE,
    "reward.judge.in_flight": CHANGEABLE,
    "reward.judge.deadline_s": CHANGEABLE,
    "reward.judge.retry_timeout_s": CHANGEABLE,
    "sandbox": CHANGEABLE,
    "rollout": _IN_FLIGHT,
    "rollout.engine": CHANGEABLE,
    "rollout.backend": CHANGEABLE,
    "rollout.dtype": CHANGEABLE,
    "rollout.kv_memory": CHANGEABLE,
    "rollout.kv_tokens": CHANGEABLE,
    "rollout.kv_on_update": CHANGEABLE,
    "rollout.shards": _fixed_rule("trajectories in flight are in the ledgers of its shards"),
    "rollout.seeding": CHANGEABLE,
    "rollout.slots": CHANGEABLE,
    "rollout.max_turns": CHANGEABLE,
    "rollout.sglang_python": CHANGEABLE,
    "rollout.sglang_options": CHANGEABLE,
    "rollout.sglang_weights": CHANGEABLE,
    "rollout.weights": CHANGEABLE,
    "rollout.broadcast": CHANGEABLE,
    "rollout.kv": CHANGEABLE,
    "rollout.verify_weights": CHANGEABLE,
    "rollout.buckets": CHANGEABLE,
    "rollout.emulate": CHANGEABLE,
    "rollout.tensor_parallel": CHANGEABLE,
    "algorithm": RECORDED,
    "algorithm.name": _fixed_rule(
        "the optimizer's state and the groups in progress belong to this algorithm"
    ),
    "algorithm.group_size": _fixed_rule("groups in progress have this size"),
    "algorithm.groups_per_step": _fixed_rule("admitted groups are counted by it"),
    "algorithm.min_group": CHANGEABLE,
    "algorithm.max_staleness": CHANGEABLE,
    "lora": _fixed_rule("the trained adapters have this shape"),
    "optimizer": RECORDED,
    "training": CHANGEABLE,
    "training.bin_tokens": RECORDED,
    "training.gradient_dtype": RECORDED,
    "weights": CHANGEABLE,
    "warm_start": _fixed_rule("version 0 exists already"),
    "evaluation": CHANGEABLE,
    "evaluation.before": _fixed_rule("the run has passed version 0"),
    "evaluation.datasets": _BUNDLED,
    "evaluation.best": _fixed_rule("the best version so far was selected by it"),
    "budget": RECORDED,
    "tracking": CHANGEABLE,
    "planner": CHANGEABLE,
    "pool": CHANGEABLE,
}
# Keys where zero switches a feature off.
ZERO_SWITCH_REASONS = {
    "optimizer.muon_lr": "at 0, AdamW trains the matrices, and each optimizer has its own state",
    "algorithm.kl_coefficient": "groups in progress carry scores of a reference, or none",
}


def find_rule(key: str) -> ChangeRule:
    """Return the rule of a dotted key; KeyError if there is no such table."""
    while key not in RULES:
        key, dot, _ = key.rpartition(".")
        if not dot:
            raise KeyError(key)
    return RULES[key]


def explain_rejected_change(key: str, old: Any, new: Any) -> str:
    """Return why a change of a key is rejected; empty if it is allowed."""
    if rule := find_rule(key).fixed_reason:
        return rule
    if (why := ZERO_SWITCH_REASONS.get(key)) and (old == 0) != (new == 0):
        return f"a change from 0 or to 0 is impossible: {why}"
    return ""


def diff_documents(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two documents differ, with (old, new); None: missing."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = dict.fromkeys([*before, *after])
    both = {key: (before.get(key), after.get(key)) for key in keys}
    return {key: (old, new) for key, (old, new) in both.items() if old != new}


def flatten(document: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all values of a document; a list is one value."""
    for name, value in document.items():
        key = f"{within}.{name}" if within else name
        if isinstance(value, dict):
            yield from flatten(value, key)
        else:
            yield key, value


def select_recorded(config: JobConfig) -> dict[str, Any]:
    """Return the values of `config` that a replay of a step needs, by dotted key."""
    return {
        key: value for key, value in flatten(config.to_document()) if find_rule(key).is_recorded
    }


def restore_recorded(config: JobConfig, settings: Mapping[str, Any]) -> JobConfig:
    """Return the job with the settings of a step, as `select_recorded` returned them.

    Keys that the settings lack are newer than they are, and had their defaults.
    """
    if not settings:
        return config
    settings = {**select_recorded(JobConfig()), **settings}
    if select_recorded(config) == settings:
        return config
    return JobConfig.from_document(apply_changes(config.to_document(), settings))


def apply_changes(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a document with other values, by dotted key."""
    copy = deepcopy(dict(document))
    for key, value in values.items():
        *tables, last = key.split(".")
        place = copy
        for table in tables:
            place = place[table]
        place[last] = value
    return copy
