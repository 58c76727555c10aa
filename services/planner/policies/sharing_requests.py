"""Answers to requests of users that place a job with another job, or apart from it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale, RejectRequest
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.services.planner.admission.gang_partners import explain_no_shared_gang
from meshrl.services.planner.pool.draft import PoolDraft


def answer_sharing_requests(
    draft: PoolDraft, jobs: Sequence[PlannedJob], partners: Mapping[str, str]
) -> dict[str, str]:
    """Grant or reject each request to place a job with another, and return the granted partners.

    `partners` are those granted so far; entries of jobs that have ended are dropped.
    """
    by_id = {job.id: job for job in jobs}
    found = {
        guest: partner for guest, partner in partners.items() if guest in by_id and partner in by_id
    }
    for request in draft.snapshot.requests:
        if request.kind != "place":
            continue
        why = _explain_rejection(draft, request, by_id, found)
        figures = {"partner": request.partner}
        draft.add_decision(RejectRequest(request.op, why, Rationale("user", request.job, figures)))
        if not why:
            found.pop(request.job, None)
            if request.partner:
                found[request.job] = request.partner
    former_guests = (partners.keys() - found.keys()) & by_id.keys()  # apart, or without a partner
    for guest in sorted(former_guests):
        core = draft.get_instances(guest).core
        if core is not None and core.instance.pinned:
            draft.update_instance(core, Rationale("user", guest), pinned=False)
    return found


def _explain_rejection(
    draft: PoolDraft,
    request: PoolRequest,
    jobs: Mapping[str, PlannedJob],
    partners: Mapping[str, str],
) -> str:
    """Explain why a job cannot be placed as requested; empty if it can."""
    settings = draft.snapshot.settings
    unknown = [name for name in (request.job, request.partner) if name and name not in jobs]
    if unknown:
        return f"there is no job {unknown[0]}, or it has ended"
    if not request.partner:
        return "" if request.job in partners else f"{request.job} is not placed with another job"
    if request.job == request.partner:
        return f"{request.job} cannot be placed with itself"
    if not settings.time_slicing or settings.jobs_per_gang < 2:
        return "this mesh lets no jobs share a gang (pool.time_slicing, pool.jobs_per_gang)"
    if request.partner in partners:
        there = partners[request.partner]
        placed = f"{request.partner} is itself placed with {there}"
        if there == request.job:
            return f"{placed}, so both share a gang; to swap them, place {request.partner} apart"
        return f"{placed}; place {request.job} with {there}, or {request.partner} apart"
    if request.job in partners.values():
        return f"other jobs are placed with {request.job}; place them apart first"
    guests = sum(
        partner == request.partner and guest != request.job for guest, partner in partners.items()
    )
    if guests + 2 > settings.jobs_per_gang:
        return (
            f"{guests + 1} jobs share the gang of {request.partner}, and pool.jobs_per_gang is "
            f"{settings.jobs_per_gang}; place another job apart, or raise it in mesh.toml"
        )
    return explain_no_shared_gang(draft, jobs[request.job], jobs[request.partner])
