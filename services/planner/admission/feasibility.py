"""The feasibility of jobs on this mesh. A job that can never run is waited with, and then fails:
workers join late, and lost ones come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import FailJob, Why
from meshrl.common.state.pool.placing.fitting import fitted, never_fits_on, too_far_apart, too_large
from meshrl.common.state.pool.placing.snapshot import Snapshot
from meshrl.common.state.pool.workers.rows import WorkerRow


def shortfalls(
    snapshot: Snapshot, counted: Sequence[WorkerRow], before: Mapping[str, int]
) -> tuple[dict[str, int], list[FailJob]]:
    """Since when which jobs have been without a mesh that they could ever run on, and those that
    fail for it now. `counted` are the workers that a job may wait for, `before` the last look's
    answer.
    """
    now_ms, settings = snapshot.now_ms, snapshot.settings
    if snapshot.gathers:
        return {}, []
    places = Counter(map(settings.place, counted))
    there = {r.job for gang in snapshot.gangs for r in gang.residents if r.core and r.settled}
    why = {}
    for job in snapshot.jobs:
        need = fitted(job.need, counted)
        why[job.id] = (
            never_fits_on(need, places, settings)
            or too_far_apart(need, counted, settings)
            or ("" if job.id in there else too_large(need, counted, settings))
        )
    short = {job: before.get(job, now_ms) for job, found in why.items() if found}
    failed = [
        FailJob(job, why[job], Why("short", job, {"there_are": len(counted)}))
        for job, since in short.items()
        if now_ms - since > 1000 * settings.short_s
    ]
    return short, failed


def runnable(jobs: Sequence[PlannedJob], failed: Sequence[FailJob]) -> list[PlannedJob]:
    """The jobs that have not ended by now, in the order in which they come: higher priorities
    first, then as they were submitted.
    """
    over = {decision.job for decision in failed}
    there = [job for job in jobs if job.id not in over]
    return sorted(there, key=lambda job: (-job.need.priority, job.submitted_ms, job.id))
