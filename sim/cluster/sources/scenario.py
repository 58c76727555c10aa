"""Scenario: hosts, jobs and arms, as a TOML file describes them.

An arm is the scenario with some of its keys changed; arms are compared with the first one.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import PlannerConfig
from meshrl.common.job.constraints import (
    ConfigTable,
    FilePath,
    Fraction,
    Integer,
    JobName,
    NonEmptyText,
    NonNegativeInteger,
    NonNegativeNumber,
    PositiveInteger,
    PositiveNumber,
)
from meshrl.common.job.renamed_keys import RENAMED_POOL_KEYS
from meshrl.common.job.schema import Schema
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.job.toml import reader
from meshrl.sim.cluster.model.availability import SegmentTable
from meshrl.sim.cluster.model.cluster import POLL_S, SimFailure, SimHosts, Switches
from meshrl.sim.cluster.model.offload import OffloadTable


@dataclass(frozen=True)
class ModelTable(ConfigTable):
    """`[jobs.model]`: the shape of the trained model; `parameters` 0: the job is emulated."""

    parameters: NonNegativeNumber = 0.0
    active: NonNegativeNumber = 0.0  # parameters used per token; 0: all
    layers: NonNegativeInteger = 0
    hidden: NonNegativeInteger = 0
    heads: NonNegativeInteger = 0
    kv_heads: NonNegativeInteger = 0
    head_dim: NonNegativeInteger = 0
    experts: NonNegativeInteger = 0
    experts_per_token: NonNegativeInteger = 0


@dataclass(frozen=True)
class MeasuredTable(ConfigTable):
    """`[jobs.measured]`: measured speeds of its engines and its trainer; `base_s` 0: none."""

    kind: JobName = "CPU"  # of the measured accelerators,
    degree: PositiveInteger = 1  # and of the engine
    base_s: NonNegativeNumber = 0.0  # of a decode step,
    sequence_s: NonNegativeNumber = 0.0  # for each sequence in it,
    context_s: NonNegativeNumber = 0.0  # and for each token of their contexts
    prefill_tokens_per_s: NonNegativeNumber = 0.0  # 0: prefill is part of the time after turns
    train_tokens_per_s: NonNegativeNumber = 0.0  # of one worker that computes gradients
    update_s: NonNegativeNumber = 0.0  # of a step, independent of the number of workers


@dataclass(frozen=True)
class AnswerTable(ConfigTable):
    """`[[jobs.workload.answers]]`: a possible answer of a tool, and its consequences."""

    tool: JobName = "tool"
    size: Literal["small", "medium", "large"] = "small"
    status: Literal["success", "failure", "timeout"] = "success"
    weight: PositiveNumber = 1.0
    seconds: NonNegativeNumber = 0.0
    tokens: NonNegativeNumber = 0.0
    ends: Fraction = 0.5  # probability that the next turn is the last one
    scale: PositiveNumber = 1.0  # factor of the lengths of all later turns


@dataclass(frozen=True)
class DriftTable(ConfigTable):
    """Quantity that changes along the run."""

    first: NonNegativeNumber = 0.0
    last: NonNegativeNumber = 0.0


@dataclass(frozen=True)
class WorkloadTable(ConfigTable):
    """`[jobs.workload]`: the trajectories. With `answers`, turns follow until an answer ends the
    trajectory; without, there are `turns`, each with a tool of `tool_s`.
    """

    trace: FilePath = ""  # JSON lines of trajectories, instead of drawn ones
    prompt: NonNegativeNumber = 512.0
    median: DriftTable = field(default_factory=lambda: DriftTable(512.0, 512.0))  # tokens of a turn
    sigma: DriftTable = field(default_factory=lambda: DriftTable(0.8, 0.8))
    group_share: Fraction = 0.0  # of the logarithm's variance, common to a group's members
    turns: PositiveInteger = 1  # with answers: maximum
    tool_s: DriftTable = field(default_factory=DriftTable)
    longest: NonNegativeInteger = 0  # tokens of a trajectory; 0: unlimited
    answers: list[AnswerTable] = field(default_factory=list)


@dataclass(frozen=True)
class JobTable(ConfigTable):
    """`[[jobs]]`: a job that runs from the start."""

    name: JobName = "job"
    steps: PositiveInteger = 48
    groups_per_step: PositiveInteger = 16
    group_size: PositiveInteger = 8
    max_staleness: NonNegativeInteger = 2
    slots: PositiveInteger = 256  # of an engine
    bin_tokens: NonNegativeInteger = 0
    colocated: bool = False  # all accelerators roll out, then all train, without a planner
    plan: Literal["", "uniform", "mixed"] = ""  # the planner's layout instead of the next keys
    ranks: PositiveInteger = 1  # of the core
    tensor: PositiveInteger = 1  # of the core: degree of tensor parallelism,
    pipeline: PositiveInteger = 1  # and stages
    degrees: list[PositiveInteger] = field(default_factory=lambda: [1])  # that engines may have
    pull_s: NonNegativeNumber = 0.0  # pause of an engine for new weights
    weights_s: NonNegativeNumber = 0.0  # from a step until engines have its weights,
    links: bool = False  # plus the transfer of the model's bytes over the network of hosts
    emulate: str = ""  # emulated engine speed, instead of a model
    emulate_training: str = ""
    measured: MeasuredTable = field(default_factory=MeasuredTable)  # instead of both
    share: PositiveNumber = 1.0
    priority: Integer = 0
    helped: bool = True
    buckets: bool = True  # C-MLFQ, if engines have several degrees
    model: ModelTable = field(default_factory=ModelTable)
    workload: WorkloadTable = field(default_factory=WorkloadTable)
    offload: OffloadTable = field(default_factory=OffloadTable)
    planner: PlannerConfig = field(default_factory=PlannerConfig)


@dataclass(frozen=True)
class ArmTable(ConfigTable):
    """`[[arms]]`: the scenario with some keys changed, each `KEY=VALUE`."""

    name: NonEmptyText = "as it is"
    set: list[str] = field(default_factory=list)
    # KEY=[VALUE, VALUE]: the fastest of all combinations is the arm.
    best: list[str] = field(default_factory=list)
    # Number of parts of the run; each uses its fastest combination, as an oracle
    # with immediate changes would; 0: one combination for the whole run.
    stretches: NonNegativeInteger = 0
    cheapest: bool = False  # of `best`, the one with most tokens for its cost, not the fastest
    segments: bool = False  # once with each of `[[segments]]`, as `hosts.spot.availability`
    paper: NonNegativeNumber = 0.0  # published speed-up over the first arm; 0: none
    ratio: str = ""  # name of the ratio of the last arm's tokens per second to this one's


@dataclass(frozen=True)
class Scenario(ConfigTable):
    """Complete file, validated."""

    title: str = ""
    sources: list[str] = field(default_factory=list)  # sources of its values
    seed: NonNegativeInteger = 0
    seeds: PositiveInteger = 1  # number of seeds from that one on: ratios are medians
    until_s: PositiveNumber = 86400.0
    hosts: list[SimHosts] = field(default_factory=lambda: [SimHosts()])
    pool: PoolSettings = field(default_factory=PoolSettings)
    switches: Switches = field(default_factory=Switches)
    planner_interval_s: PositiveNumber = POLL_S  # between passes of the planner
    failures: list[SimFailure] = field(default_factory=list)
    segments: list[SegmentTable] = field(default_factory=list)
    jobs: list[JobTable] = field(default_factory=lambda: [JobTable()])
    arms: list[ArmTable] = field(default_factory=list)


RENAMED_SCENARIO_KEYS = RENAMED_POOL_KEYS | {
    "jobs[].pace": "jobs[].emulate",
    "jobs[].training_pace": "jobs[].emulate_training",
}
SCENARIO_SCHEMA = Schema(
    Scenario, "docs/develop/simulator.md lists all keys of a scenario", RENAMED_SCENARIO_KEYS
)


@dataclass(frozen=True)
class Arm:
    """Arm to run and compare."""

    table: ArmTable
    scenarios: Mapping[str, Scenario]  # by their settings; the fastest counts


def read_arms(path: Path, changes: list[str]) -> dict[str, Arm]:
    """Read the arms of a file, in order, each with `KEY=VALUE` changes; the ConfigError names the
    invalid key.
    """
    document, places = reader.read_toml(path, "the scenario")

    def fail(key: str, message: str, fix: str) -> ConfigError:
        return reader.make_error(path, places, key, message, fix)

    for change in changes:
        apply_change(document, change)
    combined = SCENARIO_SCHEMA.validate(document, fail)
    found: dict[str, Arm] = {}
    for what, names in (
        ("arms", [a.name for a in combined.arms]),
        ("jobs", [j.name for j in combined.jobs]),
    ):
        if duplicates := [name for n, name in enumerate(names) if name in names[:n]]:
            raise fail(
                what, f"two {what} have the name {duplicates[0]}", "Use a unique name for each"
            )
    for arm in combined.arms or [ArmTable()]:
        changed = copy.deepcopy(document)
        for change in arm.set:
            apply_change(changed, change)
        tries = {}
        for chosen in product(*map(expand_choices, arm.best)):
            one = copy.deepcopy(changed)
            for change in chosen:
                apply_change(one, change)
            tries[" ".join(chosen)] = SCENARIO_SCHEMA.validate(one, fail)
        for segment in combined.segments if arm.segments else ():
            there = {
                chosen: _set_segment(scenario, segment.name) for chosen, scenario in tries.items()
            }
            name = f"{arm.name}, {segment.name}"
            found[name] = Arm(replace(arm, name=name), there)
        if not arm.segments:
            found[arm.name] = Arm(arm, tries)
    return found


def _set_segment(scenario: Scenario, name: str) -> Scenario:
    """Return a scenario whose hosts that may vanish have the availability of a segment."""
    hosts = [
        one if one.market == "reserved" else replace(one, availability=name)
        for one in scenario.hosts
    ]
    return replace(scenario, hosts=hosts)


def expand_choices(text: str) -> list[str]:
    """Expand `KEY=[VALUE, VALUE]` into a `KEY=VALUE` for each value."""
    key, _, values = text.partition("=")
    try:
        found = tomllib.loads(f"values = {values.strip()}")["values"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{text!r} is not KEY=[VALUE, VALUE]: {error}", where="best") from error
    if not isinstance(found, list) or not found:
        raise ConfigError(
            f"{text!r} has no values", where="best", fix="Write a list, such as jobs.ranks=[8, 16]"
        )
    return [f"{key.strip()}={json.dumps(value)}" for value in found]


def apply_change(document: dict[str, Any], change: str) -> None:
    """Apply a change to a document. An element of a list is selected by its `name` or `kind`, as in
    `hosts.H100.count=16`; without it all are. `workers.H100=16` sets the total number of
    accelerators of a kind, with new hosts if there were none.
    """
    key, equals, text = change.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{change!r} is not KEY=VALUE",
            fix="Write a key and a value, such as hosts.H100.count=16",
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    if parts[0] == "workers" and len(parts) == 2:
        _set_worker_count(document, parts[1], value, change)
    else:
        _set_value(document, parts, value, change)


def _set_worker_count(document: dict[str, Any], kind: str, count: Any, change: str) -> None:
    """Set the number of accelerators of a kind in whole hosts of their present size."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(
            f"{change!r} is not a number of accelerators",
            fix="Write a number, such as workers.H100=16",
        )
    hosts = document.setdefault("hosts", [])
    there = [one for one in hosts if kind.lower() in _get_names(one)]
    each = int(there[0].get("accelerators", 8)) if there else min(8, max(count, 1))
    if count % each:
        raise ConfigError(
            f"{change!r} does not fill whole hosts of {each} accelerators",
            fix=f"Set a multiple of {each}",
        )
    for one in there[1:]:
        hosts.remove(one)
    if there:
        there[0]["count"] = count // each
    elif count:
        hosts.append({"kind": kind.upper(), "count": count // each, "accelerators": each})


def _set_value(table: Any, parts: list[str], value: Any, change: str) -> None:
    first, *rest = parts
    if isinstance(table, list):
        named = [one for one in table if first.lower() in _get_names(one)]
        for one in named[:1] or table:
            _set_value(one, rest if named else parts, value, change)
        return
    there = table.get(first) if isinstance(table, dict) else None
    tables = isinstance(there, list) and any(isinstance(one, dict) for one in there)
    if not isinstance(table, dict) or (tables and not rest):
        raise ConfigError(
            f"{change!r} does not select a single value", fix="Name one key of a table"
        )
    if rest:
        _set_value(table.setdefault(first, {}), rest, value, change)
    else:
        table[first] = value


def _get_names(table: Mapping[str, Any]) -> set[str]:
    return {str(table.get(name, "")).lower() for name in ("name", "kind")}
