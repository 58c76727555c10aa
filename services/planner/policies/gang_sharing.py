"""Placement of cores of several jobs on one gang, where they take time slices.

A guest's core joins the workers of its partner's core (`admission/gang_partners.py`). If only the
guest's core has workers and the cores are equally large, the partner's joins it instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale
from meshrl.common.state.pool.scheduling.feasibility import list_slice_bytes
from meshrl.common.state.pool.workers.rows import Role
from meshrl.services.planner.admission.fair_shares import PoolDivision
from meshrl.services.planner.policies.market_limits import explain_not_taken
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement
from meshrl.services.planner.pool.residency import explain_no_slice_room

RULE = "sharing"


def evict_misplaced_cores(
    draft: PoolDraft, jobs: Sequence[PlannedJob], division: PoolDivision
) -> None:
    """Remove cores from workers that they do not share any more, or not with their partner, if a
    checkpoint covers them. They are placed again in the same pass.
    """
    by_id = {job.id: job for job in jobs}
    order = {job.id: place for place, job in enumerate(jobs)}
    for job in reversed(jobs):
        core = draft.get_instances(job.id).core
        if core is None or not job.has_checkpoint or job.id not in division.workers:
            continue
        partner = division.partners.get(job.id, "")
        if partner:
            other = draft.get_instances(partner).core
            same_size = job.requirements.ranks == by_id[partner].requirements.ranks
            if other is None:
                misplaced = core.is_awake and not same_size
            else:
                misplaced = not set(core.workers) <= set(other.workers)
        else:
            companions = division.get_companions(job.id)
            misplaced = core.is_awake and any(
                order.get(other.instance.job, -1) < order[job.id]
                and other.instance.job in division.workers
                and other.instance.job not in companions
                for other in _list_other_cores(draft, core)
            )
        if misplaced:
            draft.remove_instance(core, Rationale(RULE, job.id, {"partner": partner}))
            for engine in draft.get_instances(job.id).time_sliced_engines:
                draft.remove_instance(engine, Rationale(RULE, job.id, {"partner": partner}))


def place_beside_partners(
    draft: PoolDraft, job: PlannedJob, share: int, division: PoolDivision, requested: bool
) -> bool:
    """Place the core of a job beside that of a partner or a guest. Return True if the job has no
    other place: it is a guest.
    """
    partner = division.partners.get(job.id, "")
    if draft.get_instances(job.id).core is None:
        companions = [partner] if partner else division.get_companions(job.id)
        for companion in companions:
            core = draft.get_instances(companion).core
            if core is not None and (partner or len(core.workers) == job.requirements.ranks):
                _place_core_beside(draft, job, share, core, pinned=requested)
                break
    return bool(partner)


def end_sharing(draft: PoolDraft, jobs: Sequence[PlannedJob]) -> None:
    """End the time slices of cores that are alone on their workers."""
    for job in jobs:
        core = draft.get_instances(job.id).core
        if core is None or not core.is_awake or not core.instance.time_sliced:
            continue
        if all(len(draft.list_awake_on(worker)) == 1 for worker in core.workers):
            draft.update_instance(core, Rationale("share", job.id), time_sliced=False)


def share_core_workers(draft: PoolDraft, core: InstancePlacement, rationale: Rationale) -> None:
    """Begin the time slices of the other cores on a core's workers."""
    for other in _list_other_cores(draft, core):
        if not other.instance.time_sliced:
            draft.update_instance(other, rationale, time_sliced=True)


def _place_core_beside(
    draft: PoolDraft, job: PlannedJob, share: int, core: InstancePlacement, *, pinned: bool
) -> None:
    """Place a core on the first workers of another one, which begins to take time slices."""
    workers = core.workers[: job.requirements.ranks]
    needs = {job.id: list_slice_bytes(job.requirements)[:1]}
    if not core.is_awake or not draft.placeable_workers.issuperset(workers):
        return
    if any(explain_no_slice_room(draft, worker, needs) for worker in workers):
        return
    if explain_not_taken(draft, job, workers):
        return
    why = Rationale(RULE, job.id, {"entitled": share, "partner": core.instance.job})
    if not core.instance.time_sliced:
        draft.update_instance(core, why, time_sliced=True)
    draft.place_instance(
        workers,
        job.id,
        Role.TRAINING,
        why,
        core=True,
        time_sliced=True,
        pinned=pinned,
        expert_split=job.requirements.expert_split,
    )


def _list_other_cores(draft: PoolDraft, core: InstancePlacement) -> list[InstancePlacement]:
    """List the awake cores of other jobs on a core's workers."""
    there = {
        other.instance.id: other
        for worker in core.workers
        for other in draft.list_awake_on(worker)
        if other.instance.core and other.instance.job != core.instance.job
    }
    return list(there.values())
