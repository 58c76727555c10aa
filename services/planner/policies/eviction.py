"""Evictions that precede all other decisions: instances of ended jobs, lost workers, draining
hosts, and displaced cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import (
    MarkWorkerLost,
    Rationale,
    ReportHostPresence,
)
from meshrl.services.planner.admission.fair_shares import PoolDivision
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.presence import PoolPresence, compute_absence_s

CORE_EXIT_S = 10.0  # before the announced end of a core's host, without a checkpoint


def evict_lost(draft: PoolDraft, presence: PoolPresence) -> None:
    """Report lost hosts and workers, and remove their instances. The other workers of their gangs
    stay, in the same rank order. A gang that loses its first worker, which schedules its time
    slices, is dissolved.
    """
    report_hosts(draft, presence)
    for worker in presence.newly_lost_workers:
        draft.add_decision(MarkWorkerLost(worker, Rationale("lost")))
    known = set(draft.workers) - presence.lost_workers
    for gang in list(draft.gangs.values()):
        if known.issuperset(gang.workers):
            continue
        lost_ranks = {rank for rank, worker in enumerate(gang.workers) if worker not in known}
        lost_instances = [
            r for r in gang.instances if 0 in lost_ranks or lost_ranks.intersection(r.ranks)
        ]
        affected_jobs = {resident.job for resident in lost_instances}
        for resident in gang.instances:
            if resident in lost_instances or (
                resident.time_sliced and resident.job in affected_jobs
            ):
                draft.remove_instance(
                    draft.placements_by_job[resident.job][resident.id], Rationale("lost")
                )
        if gang.id in draft.gangs and not draft.gangs[gang.id].instances:
            draft.dissolve_gang(gang, Rationale("lost"))


def report_hosts(draft: PoolDraft, presence: PoolPresence) -> None:
    """Report which hosts have vanished, with their instances, and which have returned."""
    for name in presence.newly_lost_hosts:
        host_workers = [worker for worker in draft.workers.values() if worker.host == name]
        on = {
            seated.instance.id
            for worker in host_workers
            for seated in draft.placements_by_worker[worker.id].values()
        }
        [services] = [host.services for host in draft.snapshot.hosts if host.name == name]
        figures = {
            "workers": [worker.id for worker in host_workers],
            "residents": sorted(on),
            "services": list(services),
            "away_s": round(compute_absence_s(presence.away_since, name, draft.snapshot.now_ms), 1),
        }
        draft.add_decision(ReportHostPresence(name, False, Rationale("lost", "", figures)))
    for name in presence.returned_hosts:
        draft.add_decision(ReportHostPresence(name, True, Rationale("lost")))


def remove_instances_of_finished_jobs(
    draft: PoolDraft, unfinished_jobs: Sequence[PlannedJob]
) -> None:
    """Remove the instances of all jobs that are not in `unfinished_jobs`."""
    unfinished_ids = {job.id for job in unfinished_jobs}
    for job in sorted(set(draft.placements_by_job) - unfinished_ids):
        for placement in draft.get_instances(job).placements:
            draft.remove_instance(placement, Rationale("release", job))


def evict_displaced(
    draft: PoolDraft, job: PlannedJob, presence: PoolPresence, division: PoolDivision
) -> None:
    """Remove a running job's instances from places that they must leave, if they can go elsewhere.
    A core leaves once a checkpoint covers its state, or if the host cannot wait: for too long, or
    because its announced end is near. Its time-sliced engines leave with it.
    """
    home = division.core_places.get(job.id)
    core = draft.get_instances(job.id).core
    stays = False
    if core is not None and not job.has_checkpoint:
        hosts = {draft.workers[worker].host for worker in core.workers}
        waited_s = max(
            compute_absence_s(presence.away_since, one, draft.snapshot.now_ms) for one in hosts
        )
        ends = (draft.workers[worker].preempt_at_s for worker in core.workers)
        end_s = min((at_s for at_s in ends if at_s), default=math.inf)
        left_s = end_s - draft.snapshot.now_ms / 1000
        stays = waited_s <= draft.snapshot.settings.move_timeout_s and left_s > CORE_EXIT_S
    for seated in draft.get_instances(job.id).placements:
        out = not draft.usable_workers.issuperset(seated.workers)
        displaced = False
        if seated.instance.core and home is not None:
            displaced = {draft.get_place(worker) for worker in seated.workers} != {home}
        if not out and not displaced:
            continue
        if stays and (seated.instance.core or seated.instance.time_sliced):
            continue
        hosts = {draft.workers[worker].host for worker in seated.workers}
        rule = "drain" if out else "share"
        draft.remove_instance(seated, Rationale(rule, job.id, {"hosts": sorted(hosts)}))
