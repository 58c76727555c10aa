"""Two jobs with engines of their own, whose cores share a gang, compared with separate gangs."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.jobs.mesh import RunningMesh, accounts, mesh_up
from loadtests.measuring.entry import print_progress
from loadtests.sharing.gang_sharing import (
    PLACED_S,
    POLL_S,
    declared_budgets,
    place_beside,
    record_slices,
)
from meshrl.client.client import JobHandle
from meshrl.common.api.node import SliceRecord
from meshrl.common.job.memory.process_memory import CONTEXT_BYTES
from meshrl.common.state import jobs
from meshrl.common.state.pool.demand.role_memory import derive_role_memory
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.node.slices.policies import DEFAULT_POLICY

JOB = Path(__file__).parents[2] / "tests/mesh/jobs/digits.toml"
NAMES = ("first", "second")
SEPARATE_WORKERS, SHARED_WORKERS = 4, 3  # of two jobs: an engine and a core each, or one core's
# How figures of several rounds are combined, by a part of their names; others have a median.
WORST: Mapping[Callable[[Sequence[Any]], Any], Collection[str]] = {
    min: ("valid", "bit_equal"),
    sum: ("lost", "trained_twice"),
    max: ("late_share", "host_cores", "steal_cores"),
}
SETTINGS: dict[str, Any] = {
    "model.config.hidden_size": 512,
    "model.config.intermediate_size": 1536,
    "model.config.num_hidden_layers": 5,
    "model.config.num_attention_heads": 16,
    "model.config.num_key_value_heads": 2,
    "model.config.head_dim": 32,
    "rollout.slots": 8,
    "training.bin_tokens": 96,
    "training.deterministic": "true",
    "training.checkpoint_every": 1000,
    "algorithm.max_staleness": 0,
    "algorithm.filter_zero_variance": "false",
    "reward.deadline_s": 10.0,
    "planner.imbalance": 1000.0,
    "pool.workers.most": 2,
    "pool.colocate": "never",
}


@dataclass(frozen=True)
class GangPlan:
    """Jobs of the benchmark and the speeds of their emulated accelerators."""

    steps: int
    rollout_speed: str
    training_speed: str

    def list_overrides(self, seed: int) -> list[str]:
        """Return the `--set` overrides of a job with this seed."""
        changes = SETTINGS | {
            "seed": seed,
            "budget.steps": self.steps,
            "rollout.emulate": self.rollout_speed,
            "training.emulate": self.training_speed,
        }
        return [f"{key}={value}" for key, value in changes.items()]


@dataclass
class GangRun:
    """Results of the jobs of one mesh."""

    manifests: dict[str, list[str]] = field(default_factory=dict)  # of all steps, by job
    training_s: dict[str, float] = field(default_factory=dict)  # first to last step, by job
    span_s: float = 0.0  # from the first step of any job to the last
    slices: list[SliceRecord] = field(default_factory=list)
    state_bytes: int = 0  # of a core's parameters and moments on its worker
    needed_bytes: int = 0  # of a core, with its gradients and what it computes
    honest: dict[str, Any] = field(default_factory=dict)


async def run_gang(
    plan: GangPlan, names: Sequence[str], workers: int, shared: bool, policy: str = DEFAULT_POLICY
) -> GangRun:
    """Run the jobs at the same time on a mesh of so many workers; `shared`: cores on one gang."""
    with tempfile.TemporaryDirectory(prefix="g-") as made:
        async with mesh_up(Path(made), workers, slice_policy=policy) as mesh:
            found = GangRun()
            async with record_slices(mesh) as recording:
                handles = [await _submit(mesh, plan, names[0])]
                if shared:
                    await wait_for_core(mesh, names[0])
                for name in names[1:]:
                    handles.append(await _submit(mesh, plan, name))
                    if shared:
                        print_progress(await place_beside(mesh, name, names[0]))
                summaries = list(await asyncio.gather(*map(mesh.finished, handles)))
            found.slices, found.state_bytes = recording.slices, recording.state_bytes
            row = await jobs.read_job(mesh.state, names[0])
            memory = derive_role_memory(row.document, "cuda")
            found.needed_bytes = memory.core - CONTEXT_BYTES["cuda"]
            _read_steps(mesh, names, found)
        found.honest = {**mesh.watched.honest(), **accounts(summaries)}
    return found


async def _submit(mesh: RunningMesh, plan: GangPlan, name: str) -> JobHandle:
    return await mesh.submit(JOB, name, *plan.list_overrides(NAMES.index(name)))


async def wait_for_core(mesh: RunningMesh, job: str) -> None:
    """Wait until the planner has placed the core of a job."""
    async with asyncio.timeout(PLACED_S):
        while True:
            gangs = await pool.read_gangs(mesh.state)
            if any(one.job == job and one.core for gang in gangs for one in gang.instances):
                return
            await asyncio.sleep(POLL_S)


def _read_steps(mesh: RunningMesh, names: Sequence[str], found: GangRun) -> None:
    """Read the steps of each job from the events of its run."""
    ends: dict[str, list[float]] = {}
    for name in names:
        lines = (mesh.root / name / "events.jsonl").read_text().splitlines()
        steps = [event for event in map(json.loads, lines) if event["kind"] == "step"]
        found.manifests[name] = [step["fields"]["manifest"] for step in steps]
        ends[name] = [step["ms"] / 1000 for step in steps]
        found.training_s[name] = ends[name][-1] - ends[name][0]
    found.span_s = max(e[-1] for e in ends.values()) - min(e[0] for e in ends.values())


def describe_switches(slices: Sequence[SliceRecord], span_s: float) -> dict[str, Any]:
    """Return durations and shares of the moves of tensors between slices."""
    moved = [one for one in slices if one.moves]
    cold = [
        one.granted_s - one.chosen_s
        for one in moved
        if any(move.source == Tier.DISK or move.target == Tier.DISK for move in one.moves)
    ]
    all_s = [one.granted_s - one.chosen_s for one in moved]
    warm = [s for s in all_s if s not in cold]
    loaded = sum(
        move.size_bytes for one in moved for move in one.moves if move.target == Tier.ACCELERATOR
    )
    hidden = sum(one.hidden_bytes for one in slices)
    return {
        "slices": len(slices),
        "switches": len([one for one in slices if one.moves or one.hidden_bytes]),
        "switch_s_warm": statistics.median(warm) if warm else None,
        "switch_s_cold": statistics.median(cold) if cold else None,
        "switch_share": sum(all_s) / span_s if span_s else None,
        "prefetch_hidden_share": hidden / (hidden + loaded) if hidden + loaded else None,
    }


def compare_policy(first: GangRun, other: GangRun) -> dict[str, float]:
    """Return the makespan and the longest waits for slices of a run relative to another policy."""
    return {
        "makespan_ratio": other.span_s / first.span_s,
        "wait_p99_ratio": _compute_wait_p99_s(other.slices) / _compute_wait_p99_s(first.slices),
    }


def _compute_wait_p99_s(slices: Sequence[SliceRecord]) -> float:
    waits = [one.granted_s - one.requested_s for one in slices]
    return statistics.quantiles(waits, n=100, method="inclusive")[98]


def compare_runs(
    alone: Mapping[str, GangRun], separate: GangRun, shared: GangRun
) -> dict[str, Any]:
    """Compare the shared gang with separate gangs, and each job with its run alone."""
    is_equal = all(shared.manifests[name] == run.manifests[name] for name, run in alone.items())
    separate_hours = SEPARATE_WORKERS * separate.span_s
    return {
        "bit_equal": int(is_equal),
        "gpu_hours_saved": 1 - SHARED_WORKERS * shared.span_s / separate_hours,
        "slowdown_max": max(
            shared.training_s[name] / run.training_s[name] for name, run in alone.items()
        ),
    }


def describe_validity(runs: Sequence[GangRun]) -> dict[str, Any]:
    """Return the sums of what runs lost, and the worst figures of their hosts."""
    return {
        "valid": min(run.honest["valid"] for run in runs),
        "lost": sum(run.honest["lost"] for run in runs),
        "trained_twice": sum(run.honest["trained_twice"] for run in runs),
        "late_share": max(run.honest["late_share"] or 0.0 for run in runs),
        "host_cores": max(run.honest["host_cores"] for run in runs),
        "steal_cores": max(run.honest.get("steal_cores", 0.0) for run in runs),
    }


def measure_shared_gang(
    plan: GangPlan,
    budgets: Sequence[float],
    policies: Sequence[str],
    repeats: int,
    environ: MutableMapping[str, str],
) -> dict[str, Any]:
    """Run rounds of all runs, so that those to compare alternate, and return combined figures."""
    rounds = []
    for _ in range(repeats):
        rounds.append(_measure_round(plan, budgets, policies, environ))
        print_progress(rounds[-1])
    return {"repeats": repeats} | combine_rounds(rounds)


def _measure_round(
    plan: GangPlan,
    budgets: Sequence[float],
    policies: Sequence[str],
    environ: MutableMapping[str, str],
) -> dict[str, Any]:
    """Run each job alone, both on separate gangs, and both on one gang at each budget.

    A budget of 1.6 holds the tensors of a core 1.6 times, beside what one core computes. Figures of
    all but the first end with their budget in percent. At the first one, further runs have other
    policies, and too little host memory for a kind, so that all kinds go to the disk.
    """
    alone = {name: asyncio.run(run_gang(plan, [name], 2, False)) for name in NAMES}
    separate = asyncio.run(run_gang(plan, NAMES, SEPARATE_WORKERS, False))
    # Gradients are as large as the parameters, and so is the one moment.
    instance_bytes = round(1.5 * max(run.state_bytes for run in alone.values()))
    working_bytes = max(run.needed_bytes for run in alone.values()) - instance_bytes
    runs = {**{f"alone_{name}": run for name, run in alone.items()}, "separate": separate}

    def run_shared(
        name: str, budget: float, policy: str = DEFAULT_POLICY, **more_bytes: int
    ) -> dict[str, Any]:
        accelerator = round(budget * instance_bytes + working_bytes)
        with declared_budgets(environ, accelerator=accelerator, **more_bytes):
            shared = asyncio.run(run_gang(plan, NAMES, SHARED_WORKERS, True, policy))
        runs[name] = shared
        found = compare_runs(alone, separate, shared) | describe_validity([shared])
        found |= describe_switches(shared.slices, shared.span_s)
        print_progress({"run": name, "budget": budget, "policy": policy, **more_bytes, **found})
        return found

    figures = run_shared(DEFAULT_POLICY, budgets[0])
    for policy in policies:
        run_shared(policy, budgets[0], policy)
    for budget in budgets[1:]:
        name = f"at_{100 * budget:.0f}"
        figures |= {f"{key}_{name}": value for key, value in run_shared(name, budget).items()}
    cold = run_shared("cold", budgets[0], memory=instance_bytes // 8)
    figures |= {"switch_s_cold": cold["switch_s_cold"], "instance_bytes": instance_bytes}
    for key in ("bit_equal", "switch_share", *describe_validity([runs["cold"]])):
        figures[f"{key}_cold"] = cold[key]
    for policy in (DEFAULT_POLICY, *policies):
        found = describe_validity([runs[policy]])
        if policy != DEFAULT_POLICY:
            found |= compare_policy(runs[DEFAULT_POLICY], runs[policy])
        figures |= {f"{policy}_gang_{key}": value for key, value in found.items()}
    invalid = [name for name, run in runs.items() if not run.honest["valid"]]
    return figures | describe_validity(list(runs.values())) | {"invalid_runs": invalid}


def combine_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure; of checks and of the host's figures, the worst."""
    return {key: _combine(key, [one[key] for one in rounds]) for key in rounds[0]}


def _combine(key: str, values: Sequence[Any]) -> Any:
    """Combine the values of one figure in several rounds; those that are None are left out."""
    known = [value for value in values if value is not None]
    if key == "invalid_runs":
        return sorted({name for names in known for name in names})
    if not known:
        return None
    for combine, names in WORST.items():
        if any(name in key for name in names):
            return combine(known)
    return statistics.median(known)
