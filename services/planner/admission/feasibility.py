"""Feasibility of jobs on this mesh. An infeasible job waits for a time limit before it fails,
because workers join late and lost workers return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import FailJob, Rationale
from meshrl.common.state.pool.scheduling.feasibility import (
    drop_infeasible_degrees,
    explain_market_limits,
    explain_no_colocation,
    explain_no_common_location,
    explain_too_few_workers,
    explain_too_little_memory,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolSnapshot
from meshrl.common.state.pool.workers.rows import WorkerRow


def find_infeasible_jobs(
    snapshot: PoolSnapshot,
    expected_workers: Sequence[WorkerRow],
    infeasible_since: Mapping[str, int],
) -> tuple[dict[str, int], list[FailJob]]:
    """Find the jobs that fit on no mesh of the expected workers.

    Return the time since which each is infeasible, in Redis milliseconds, and the failures of jobs
    whose time limit has passed. `infeasible_since` is the first result of the previous pass.
    """
    now_ms, settings = snapshot.now_ms, snapshot.settings
    if snapshot.is_gathering_workers or snapshot.is_starting:
        return {}, []
    places = Counter(map(settings.get_gang_location, expected_workers))
    there = {r.job for gang in snapshot.gangs for r in gang.instances if r.core and r.is_reconciled}
    why = {}
    for job in snapshot.jobs:
        need = drop_infeasible_degrees(job.requirements, expected_workers)
        why[job.id] = (
            explain_too_few_workers(need, places, settings)
            or explain_market_limits(need, expected_workers, settings)
            or explain_no_common_location(need, expected_workers, settings)
            or (
                ""
                if job.id in there
                else explain_too_little_memory(need, expected_workers, settings)
                or explain_no_colocation(need, expected_workers, settings)
            )
        )
    short = {job: infeasible_since.get(job, now_ms) for job, found in why.items() if found}
    failed = [
        FailJob(job, why[job], Rationale("short", job, {"there_are": len(expected_workers)}))
        for job, since in short.items()
        if now_ms - since > 1000 * settings.shortage_grace_s
    ]
    return short, failed


def order_runnable_jobs(jobs: Sequence[PlannedJob], failed: Sequence[FailJob]) -> list[PlannedJob]:
    """Return the jobs that have not ended, highest priority first, then in order of submission."""
    over = {decision.job for decision in failed}
    there = [job for job in jobs if job.id not in over]
    return sorted(there, key=lambda job: (-job.requirements.priority, job.submitted_ms, job.id))
