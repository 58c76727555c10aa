"""Pausing of jobs whose workers are needed by others, and their resumption.

A paused job keeps its core asleep where it is. Engines, hybrids and frozen models have no unique
state, and leave. Other instances may use the workers while the core sleeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale, SetBlockReason
from meshrl.common.state.pool.scheduling.feasibility import (
    estimate_offload_bytes,
    has_room,
    list_slice_bytes,
)
from meshrl.common.state.pool.store.documents import id_sort_key
from meshrl.common.state.pool.workers.rows import InstancePhase, Tier
from meshrl.services.planner.admission.fair_shares import PoolDivision, has_started
from meshrl.services.planner.policies.gang_sharing import share_core_workers
from meshrl.services.planner.policies.placement import (
    explain_no_engine_room,
    explain_no_scoring_room,
)
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement
from meshrl.services.planner.pool.residency import explain_no_slice_room


def update_block_reason(draft: PoolDraft, job: PlannedJob, division: PoolDivision) -> None:
    """Add a decision that sets why a job waits or is paused, if the reason has changed.

    The reason is empty for a job that runs. A job with a share waits while the workers of its core
    are not free, and while its core has no engine. While a new mesh gathers workers, no job is
    reported as waiting.
    """
    admitted = job.id in division.workers
    reason = _explain_waiting(draft, job, division) if admitted else division.rejected.get(job.id)
    core = draft.get_instances(job.id).core
    has_core = admitted and core is not None and core.is_awake
    kind = "paused" if has_started(job) and not has_core else "waiting"
    block_reason = f"{kind}: {reason}" if reason is not None else ""
    is_early = draft.snapshot.is_gathering_workers or draft.snapshot.is_starting
    if block_reason == job.block_reason or (
        is_early and reason is not None and not has_started(job)
    ):
        return
    rule = "share" if admitted else "preempt" if has_started(job) else "queue"
    inputs = {"entitled": division.workers.get(job.id, 0), "priority": job.requirements.priority}
    draft.add_decision(SetBlockReason(job.id, block_reason, Rationale(rule, job.id, inputs)))


def free_accelerators(draft: PoolDraft, job: PlannedJob) -> None:
    """Put the core of a job without a share to sleep, and remove its other instances.

    The core is removed too if the job never ran. It is also removed if it still starts or has lost
    a worker, and a checkpoint covers its steps.
    """
    instances = draft.get_instances(job.id)
    rationale = Rationale("preempt", job.id, {"priority": job.requirements.priority})
    for placement in instances.placements:
        has_unusable_worker = any(
            worker not in draft.usable_workers for worker in placement.workers
        )
        # A starting core may take hours, so it does not sleep before it is ready.
        # Another start would repeat the work of this one.
        is_starting = placement.is_awake and placement.instance.phase == InstancePhase.STARTING
        is_starting = is_starting and (job.has_checkpoint or not job.steps_done)
        must_restart = (has_unusable_worker and job.has_checkpoint) or is_starting
        if placement is not instances.core or not has_started(job) or must_restart:
            draft.remove_instance(placement, rationale)
            continue
        since_ms = draft.snapshot.now_ms - placement.instance.desired_since_ms
        is_late = (
            not placement.instance.is_reconciled
            and since_ms > 1000 * draft.snapshot.settings.move_timeout_s
        )
        if placement.is_awake or placement.instance.phase == InstancePhase.FAILED or is_late:
            _put_core_to_sleep(draft, job, placement, rationale)


def wake_core(draft: PoolDraft, job: PlannedJob, share: int, division: PoolDivision) -> None:
    """Wake a sleeping core on its workers, and remove the instances that occupy them.

    Those of jobs with which it shares the workers stay. If another core occupies them, or a worker
    is lost, remove the sleeping core instead: it resumes from its checkpoint elsewhere. Without a
    checkpoint, change nothing.
    """
    core = draft.get_instances(job.id).core
    if core is None or core.is_awake or core.instance.tier == Tier.ABSENT:  # the last one leaves
        return
    rationale = Rationale("share", job.id, {"entitled": share})
    companions = division.get_companions(job.id)
    beside = [s for w in core.workers for s in draft.list_awake_on(w)]
    shared = [
        s
        for s in beside
        if s.instance.job in companions and (s.instance.core or s.instance.time_sliced)
    ]
    others = [s for s in beside if s not in shared]
    if any(worker not in draft.usable_workers for worker in core.workers) or any(
        other.instance.core for other in others
    ):
        if job.has_checkpoint:
            draft.remove_instance(core, rationale)
        return
    needs = {job.id: list_slice_bytes(job.requirements)[:1]}
    if shared and any(explain_no_slice_room(draft, worker, needs) for worker in core.workers):
        return
    for other in {placement.instance.id: placement for placement in others}.values():
        draft.remove_instance(other, rationale)
    core = draft.update_instance(core, rationale, tier=Tier.ACCELERATOR, time_sliced=bool(shared))
    if shared:
        share_core_workers(draft, core, rationale)


def find_waking_workers(draft: PoolDraft, jobs: Iterable[PlannedJob]) -> set[str]:
    """Return the workers on which cores of these jobs sleep and are to wake."""
    cores = (draft.get_instances(job.id).core for job in jobs)
    return {w for core in cores if core is not None and not core.is_awake for w in core.workers}


def _explain_waiting(draft: PoolDraft, job: PlannedJob, division: PoolDivision) -> str | None:
    """Explain why an admitted job waits for its core or its first engine; None if it does not."""
    core = draft.get_instances(job.id).core
    partner = division.partners.get(job.id, "")
    core_place = division.core_places.get(job.id, "")
    if core is not None and core.is_awake:
        return _explain_no_engine(draft, job, division)
    if partner:
        return f"its core is to share the workers of {partner}, and these are not ready yet"
    if core is not None:
        return None
    ranks = job.requirements.ranks
    needed = f"its core needs {ranks} of {core_place}" if ranks > 1 else "its core needs a worker"
    leaving = {
        s.instance.id: f"{s.instance.id} of {s.instance.job}"
        for worker in draft.placeable_workers
        if ranks == 1 or draft.get_place(worker) == core_place
        for s in draft.placements_by_worker[worker].values()
        if not s.is_awake and not s.instance.is_reconciled
    }
    if leaving:
        first = leaving[min(leaving, key=id_sort_key)]
        more = f" and {len(leaving) - 1} more" if len(leaving) > 1 else ""
        return f"{needed}; not yet asleep: {first}{more}"
    return f"{needed}, and no placeable worker is free yet"


def _explain_no_engine(draft: PoolDraft, job: PlannedJob, division: PoolDivision) -> str | None:
    """Explain why a job gets no engine or no frozen models beside its core; None if it has them or
    gets them.
    """
    team, needs = draft.get_instances(job.id), job.requirements
    lacks_scoring = needs.needs_scoring and needs.can_share_scoring and team.scoring is None
    if lacks_scoring and division.time_slicing and (why := explain_no_scoring_room(draft, job)):
        fix = "join a worker for them, or one with larger budgets (`--accelerator-bytes`)"
        return f"its frozen models do not fit beside its core: {why}: {fix}"
    has_engine = not needs.needs_rollout or team.engines or team.time_sliced_engines
    has_own_workers = division.workers[job.id] >= needs.worker_floor and not needs.is_colocated
    if has_engine or has_own_workers or not division.time_slicing or not needs.can_time_slice:
        return None
    if not (why := explain_no_engine_room(draft, job)):
        return None
    fix = "join a worker for an engine, or one with larger budgets (`--accelerator-bytes`)"
    return f"its core has no engine, as none fits beside it: {why}: {fix}"


def _put_core_to_sleep(
    draft: PoolDraft, job: PlannedJob, core: InstancePlacement, rationale: Rationale
) -> None:
    """Offload the core to disk; if the disk is full or has failed, to memory; else keep only its
    checkpoint.
    """
    tiers = [Tier.DISK, Tier.MEMORY]
    if not core.is_awake:  # it has failed to reach its tier
        tiers = tiers[tiers.index(core.instance.tier) + 1 :] if core.instance.tier in tiers else []
    more = estimate_offload_bytes(core.instance, job.requirements)

    def holds(worker: str, tier: Tier) -> bool:
        there = [
            s.instance
            for s in draft.placements_by_worker[worker].values()
            if s.instance.tier == tier
        ]
        asleep = sum(
            estimate_offload_bytes(r, draft.requirements_by_job[r.job])
            for r in there
            if r.job in draft.requirements_by_job
        )
        return has_room(draft.workers[worker].budget, tier, asleep, more)

    for tier in tiers:
        if all(holds(worker, tier) for worker in core.workers):
            draft.update_instance(core, rationale, tier=tier, time_sliced=False)
            return
    if job.has_checkpoint:
        draft.remove_instance(core, rationale)
