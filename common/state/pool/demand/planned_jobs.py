"""Planner's view of a job, from its row, its document and what its processes publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.api.stats import CoreStats
from meshrl.common.hardware.accelerators import predict_gradient_transfer_s
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measurements import (
    Measurements,
    decode_curve,
    decode_lengths,
    decode_work,
    merge_lengths,
)
from meshrl.common.state.pool.demand.requirements import (
    PlannedJob,
    derive_requirements,
    explain_no_hybrids,
)


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """Live process and its published stats."""

    name: str
    kind: str
    incarnation: str
    stats: Mapping[str, Any]


PROGRESS_STATS = {
    "engine": "tokens",
    "trainer": "step",
    "hybrid": "bins",
}  # stat with a process's work so far


def build_planned_job(
    row: Mapping[str, Any],
    document: Mapping[str, Any],
    processes: Sequence[ProcessStats] = (),
    kinds_by_gang: Mapping[str, str] | None = None,
) -> PlannedJob:
    """Return the job of a row, its document (the resolved job file) and its live processes.

    `kinds_by_gang`: accelerator kind of the workers of each gang.
    """
    kinds = kinds_by_gang or {}
    # The core's published types count too: a version, or the base of its adapters, may have other
    # types than the document requests.
    need = derive_requirements(document)
    cores = [CoreStats.decode(p.stats) for p in processes if p.kind == "trainer"]
    there = {name for core in cores for name in core.published}
    if explain_no_hybrids(there, document["training"]["dtype"]):
        need = replace(need, allows_hybrids=False)
    bundle, rollout = document.get("bundle", {}), document["rollout"]
    shape, parameters = bundle.get("shape"), bundle.get("parameters", 0)
    model = (f"{parameters} parameters", rollout.get("dtype", ""), rollout.get("emulate", ""))
    return PlannedJob(
        id=row["id"],
        phase=Phase(row["phase"]),
        requirements=need,
        config=PlannerConfig(**document.get("planner", {})),
        groups_per_step=row["groups_per_step"],
        group_size=document["algorithm"]["group_size"],
        max_staleness=document["algorithm"]["max_staleness"],
        slots=rollout["slots"],
        bin_tokens=document["training"]["bin_tokens"],
        activation_checkpointing=document["training"].get("activation_checkpointing", False),
        gradient_transfer_s=max((core.gradient_transfer_s for core in cores), default=0.0)
        or predict_gradient_transfer_s(need.gradient_bytes, _find_core_kind(processes, kinds)),
        total_steps=document["budget"]["steps"],
        rejected_trajectories=row["stale_requeued"],
        submitted_ms=row["submitted_ms"],
        steps_done=row["steps_done"],
        block_reason=row["block_reason"],
        has_checkpoint=bool(row["checkpoint"]),
        instance_progress={
            process.stats["instance"]: int(process.stats.get(PROGRESS_STATS[process.kind], 0))
            for process in processes
            if process.kind in PROGRESS_STATS and process.stats.get("instance")
        },
        measurements=collect_measurements(processes, kinds),
        emulated_engine=rollout.get("emulate", ""),
        emulated_training=document["training"].get("emulate", ""),
        model_key=" ".join(filter(None, model)),
        model_shape=ModelShape(**shape) if shape else None,
    )


def _find_core_kind(processes: Sequence[ProcessStats], kinds_by_gang: Mapping[str, str]) -> str:
    """Return the accelerator kind of a job's core; empty if there is no core."""
    gangs = (p.stats.get("gang", "") for p in processes if p.kind == "trainer")
    return next((kinds_by_gang[gang] for gang in gangs if gang in kinds_by_gang), "")


def collect_measurements(
    processes: Sequence[ProcessStats], kinds_by_gang: Mapping[str, str]
) -> Measurements:
    """Return the measurements of a job's live processes, by name and incarnation.

    A restarted process counts from zero.
    """
    return Measurements(
        {
            p.name + p.incarnation: decode_work(p.stats["work"])
            for p in processes
            if "work" in p.stats
        },
        tuple(
            decode_curve(kinds_by_gang.get(p.stats.get("gang", ""), ""), p.stats["decode_curve"])
            for p in processes
            if p.stats.get("decode_curve")
        ),
        merge_lengths(
            [decode_lengths(p.stats["lengths"]) for p in processes if p.stats.get("lengths")]
        ),
        {
            profile["kind"]["name"]: profile
            for p in processes
            if (profile := p.stats.get("profile"))
        },
    )
