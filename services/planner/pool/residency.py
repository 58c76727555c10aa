"""Space on a worker for instances that share its accelerator by time slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.common.state.pool.scheduling.feasibility import (
    SliceBytes,
    estimate_offload_bytes,
    estimate_slice_bytes,
    explain_no_residency,
)
from meshrl.services.planner.pool.draft import PoolDraft


def explain_no_slice_room(
    draft: PoolDraft, worker: str, needs_by_job: Mapping[str, Sequence[SliceBytes]]
) -> str:
    """Return why instances of jobs do not fit on a worker; empty if they fit.

    Those that are there need room too, and only so many jobs share a gang. `needs_by_job` has the
    bytes of the slices of each job that is to compute there; it replaces the present instances of
    that job. Cores of other jobs that sleep there keep their bytes.
    """
    most = draft.snapshot.settings.jobs_per_gang
    jobs = {seated.instance.job for seated in draft.list_awake_on(worker)} | needs_by_job.keys()
    if len(jobs) > most:
        return f"{len(jobs)} jobs would share {worker}, and pool.jobs_per_gang is {most}"
    slices = [need for needs in needs_by_job.values() for need in needs]
    asleep = 0
    for seated in draft.placements_by_worker[worker].values():
        instance = seated.instance
        requirements = draft.requirements_by_job.get(instance.job)
        if instance.job in needs_by_job or requirements is None:
            continue
        if seated.is_awake:
            ranks = len(instance.ranks)
            slices.append(estimate_slice_bytes(instance.role, instance.core, ranks, requirements))
        else:
            asleep += estimate_offload_bytes(instance, requirements)
    return explain_no_residency(draft.workers[worker].budget, slices, asleep)
