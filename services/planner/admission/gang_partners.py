"""Partners of jobs on a gang: which jobs take time slices of the workers of another job's core.

A guest's core computes on the workers of its partner's core. Users request it, or it replaces a
pause: a job that would get no workers takes time slices of a job of the same or a lower priority.
A job never slows down one of a higher priority without a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.feasibility import list_slice_bytes
from meshrl.services.planner.admission.fair_shares import PoolDivision
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.residency import explain_no_slice_room


def select_requested_partners(
    draft: PoolDraft, jobs: Sequence[PlannedJob], requested: Mapping[str, str]
) -> dict[str, str]:
    """Return the requested partners of those guests whose cores can join them now."""
    by_id = {job.id: job for job in jobs}
    return {
        guest: partner
        for guest, partner in requested.items()
        if guest in by_id
        and partner in by_id
        and is_ready_to_join(draft, by_id[guest], by_id[partner])
        and not explain_no_shared_gang(draft, by_id[guest], by_id[partner])
    }


def find_present_partners(
    draft: PoolDraft, jobs: Sequence[PlannedJob], requested: Mapping[str, str], can_leave: bool
) -> dict[str, str]:
    """Return the partners of guests whose cores compute beside them and stay there.

    With `can_leave`, of two jobs of one priority the later one leaves if a checkpoint covers it.
    `requested` partners go first.
    """
    cores = {job.id: draft.get_instances(job.id).core for job in jobs}
    running = [job for job in jobs if (core := cores[job.id]) is not None and core.is_awake]
    found = dict(requested)
    for place, later in enumerate(running):
        for earlier in running[:place]:
            after, before = later.requirements, earlier.requirements
            stays = not later.has_checkpoint and after.priority == before.priority
            guest, partner = (earlier, later) if after.ranks > before.ranks else (later, earlier)
            is_free = {guest.id, partner.id}.isdisjoint(found) and guest.id not in found.values()
            if is_free and (stays or not can_leave) and _is_beside(draft, guest, partner):
                found[guest.id] = partner.id
    return found


def find_partners(
    draft: PoolDraft, jobs: Sequence[PlannedJob], division: PoolDivision
) -> dict[str, str]:
    """Find partners for the rejected jobs, in the order of the jobs.

    A job keeps its present partner, or gets one with the fewest guests and the lowest priority.
    """
    max_guests = draft.snapshot.settings.jobs_per_gang - 1
    guests = Counter(division.partners.values())
    found: dict[str, str] = {}
    hosts = [
        job
        for job in jobs
        if job.id in division.workers
        and job.id not in division.partners
        and job.requirements.colocate != "never"
        and guests[job.id] < max_guests
    ]
    for job in jobs:
        if not hosts:
            break
        if job.id not in division.rejected or job.requirements.colocate == "never":
            continue
        suitable = [host for host in hosts if _can_join(draft, job, host)]
        if not suitable:
            continue
        best = min(
            suitable,
            key=lambda host: (
                not _is_beside(draft, job, host),
                guests[host.id],
                host.requirements.priority,
            ),
        )
        found[job.id] = best.id
        guests[best.id] += 1
        if guests[best.id] >= max_guests:
            hosts.remove(best)
    return found


def is_ready_to_join(draft: PoolDraft, guest: PlannedJob, partner: PlannedJob) -> bool:
    """Return True if a guest's core can join its partner's without loss of steps.

    It is there, or the partner can come to it, or a checkpoint covers it, or it has no core.
    """
    core, other = draft.get_instances(guest.id).core, draft.get_instances(partner.id).core
    if core is None or guest.has_checkpoint:
        return True
    if other is None:
        return core.is_awake and guest.requirements.ranks == partner.requirements.ranks
    return set(core.workers) <= set(other.workers)


def explain_no_shared_gang(draft: PoolDraft, guest: PlannedJob, partner: PlannedJob) -> str:
    """Return why a guest's core can never share the workers of its partner's core; empty if it
    can.
    """
    ranks, there = guest.requirements.ranks, partner.requirements.ranks
    if ranks > there:
        return (
            f"the core of {guest.id} has {ranks} ranks, and that of {partner.id} only {there}: "
            f"place {partner.id} with {guest.id} instead, or change training.ranks"
        )
    core = draft.get_instances(partner.id).core or draft.get_instances(guest.id).core
    workers = core.workers[:ranks] if core is not None else sorted(draft.usable_workers)
    needs = {
        job.id: list_slice_bytes(job.requirements, with_scoring=job.requirements.needs_scoring)
        for job in (guest, partner)
    }
    reasons = [explain_no_slice_room(draft, worker, needs) for worker in workers]
    if reasons.count("") >= ranks:
        return ""
    why = next(filter(None, reasons), "the mesh has no workers")
    return f"{guest.id} and {partner.id} do not fit on one worker: {why}"


def _can_join(draft: PoolDraft, guest: PlannedJob, partner: PlannedJob) -> bool:
    return (
        partner.requirements.priority <= guest.requirements.priority
        and is_ready_to_join(draft, guest, partner)
        and not explain_no_shared_gang(draft, guest, partner)
    )


def _is_beside(draft: PoolDraft, guest: PlannedJob, partner: PlannedJob) -> bool:
    """Return True if the cores of two jobs lie on the same workers."""
    core, other = draft.get_instances(guest.id).core, draft.get_instances(partner.id).core
    return core is not None and other is not None and set(core.workers) <= set(other.workers)
