"""Check that rejects jobs that the mesh could never run, before they are packed or sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshrl.common.base.errors import Refused
from meshrl.common.job.config import JobConfig
from meshrl.common.job.isolation.tiers import TIER_DESCRIPTIONS
from meshrl.common.job.memory.remedies import MemoryNeed, describe_remedies, find_remedies
from meshrl.common.state import registry
from meshrl.common.state.pool.demand.requirements import JobRequirements, derive_requirements
from meshrl.common.state.pool.scheduling.feasibility import (
    drop_infeasible_degrees,
    explain_infeasible,
    explain_too_little_memory,
)
from meshrl.common.state.pool.scheduling.host_services import explain_rejected_service
from meshrl.common.state.pool.scheduling.snapshot import PoolHost
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES
from meshrl.common.state.pool.workers.rows import WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX

SETTINGS_KEY = f"{MESH_PREFIX}:settings"  # settings of the mesh, written by the launcher


async def check_job_is_feasible(
    state: StateClient, requirements: JobRequirements, document: Mapping[str, Any] | None = None
) -> None:
    """Raise Refused if a job could never run, with its requirements and the mesh's resources.

    A job is rejected if it could not run without other jobs, or if no host has the isolation for
    its model's code. A mesh without workers accepts all: workers are still joining. `document`: the
    job's, for the changes with which it would fit.
    """
    if reason := explain_missing_isolation(await read_host_offers(state), requirements):
        raise Refused(reason, fix="`meshrl doctor` on one of them lists what it is missing")
    workers = await pool.read_workers(state)
    if not workers:
        return
    row = json.loads(await state.run_command("GET", SETTINGS_KEY) or "{}")
    settings = PoolSettings.from_document(row.get("pool", {}))
    if reason := explain_infeasible(requirements, workers, settings):
        raise Refused(reason, fix=find_memory_fix(document, workers, settings) if document else "")


def find_memory_fix(
    document: Mapping[str, Any], workers: Sequence[WorkerRow], settings: PoolSettings
) -> str:
    """Return the keys with which a job fits into these workers' memory; empty if memory suffices.

    Each is tried.
    """
    models = document.get("bundle", {})
    requirements = drop_infeasible_degrees(derive_requirements(document), workers)
    if not explain_too_little_memory(requirements, workers, settings):
        return ""

    def measure(config: JobConfig) -> MemoryNeed:
        changed = derive_requirements(config.to_document() | {"bundle": models})
        memory = changed.memory
        engine = min(memory.engines.values(), default=0) if changed.needs_rollout else 0
        fits = not explain_infeasible(changed, workers, settings)
        return MemoryNeed(max(memory.core, engine), fits)

    config = JobConfig.from_document({k: v for k, v in document.items() if k != "bundle"})
    return describe_remedies(find_remedies(config, measure))


async def read_host_offers(state: StateClient) -> list[PoolHost]:
    """Return the hosts of the mesh with their services, including hosts that left recently."""
    return [pool.decode_host(entry) for entry in await registry.list_entries(state, "node")]


def explain_missing_isolation(hosts: Sequence[PoolHost], requirements: JobRequirements) -> str:
    """Return why no host can isolate a sandbox of a job; empty if one can.

    Hosts report their isolation. If no host accepts sandboxes the job waits for one.
    """
    candidates = [host for host in hosts if SERVICE_NAMES["sandbox"] in host.accepted_services]
    if not requirements.sandboxes or not candidates:
        return ""
    reasons = {
        host.name: explain_rejected_service(host, "sandbox", requirements) for host in candidates
    }
    if any(host.is_probing_isolation for host in candidates) or not all(reasons.values()):
        return ""
    details = "; ".join(f"{name} {reason}" for name, reason in sorted(reasons.items()))
    return (
        "the job runs code that the model wrote in "
        f"{TIER_DESCRIPTIONS[requirements.isolation_tier]} (sandbox.tier = "
        f"{requirements.isolation_tier}), and no host that accepts sandboxes has it: {details}"
    )
