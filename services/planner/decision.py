"""Decisions of the planner: one pure function of a snapshot and a memory. It returns the decisions
and the new memory.

Each policy module answers one question; this module calls them in order. Each works on the draft
that the previous one left. A snapshot that already contains the decisions leads to no new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Decision
from meshrl.common.state.pool.scheduling.feasibility import (
    count_markets,
    drop_infeasible_degrees,
    drop_infeasible_sharing,
    limit_to_markets,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolSnapshot
from meshrl.services.planner.admission.fair_shares import PoolDivision, ShareClaim, divide_pool
from meshrl.services.planner.admission.feasibility import find_infeasible_jobs, order_runnable_jobs
from meshrl.services.planner.admission.gang_partners import (
    find_partners,
    find_present_partners,
    select_requested_partners,
)
from meshrl.services.planner.admission.service_hosts import ServiceHosts
from meshrl.services.planner.balance.calibration import update_correction
from meshrl.services.planner.balance.colocation import apply_mode
from meshrl.services.planner.balance.rebalancing import SimulationBudget, balance_job
from meshrl.services.planner.balance.seeding import (
    limit_preemptible,
    release_surplus,
    update_seeding,
)
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.policies import pausing, role_moves
from meshrl.services.planner.policies.core_placement import place_core
from meshrl.services.planner.policies.engine_placement import has_no_engine_place
from meshrl.services.planner.policies.eviction import (
    evict_displaced,
    evict_lost,
    remove_instances_of_finished_jobs,
)
from meshrl.services.planner.policies.expert_split import choose_expert_split
from meshrl.services.planner.policies.gang_sharing import (
    end_sharing,
    evict_misplaced_cores,
    place_beside_partners,
)
from meshrl.services.planner.policies.market_limits import release_untaken
from meshrl.services.planner.policies.placement import (
    end_time_slicing,
    grow_job,
    place_floor,
    shrink_to_share,
)
from meshrl.services.planner.policies.pool_requests import answer_requests
from meshrl.services.planner.policies.scaling import plan_scaling
from meshrl.services.planner.policies.service_placement import place_services
from meshrl.services.planner.policies.sharing_requests import answer_sharing_requests
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.presence import PoolPresence, compute_presence


def decide(snapshot: PoolSnapshot, memory: PlannerMemory) -> tuple[list[Decision], PlannerMemory]:
    """Compute the planner's decisions for one snapshot, in the order in which they apply.

    Return them with the memory for the next pass. The function reads no clock and no Redis: the
    current time is `snapshot.now_ms`.
    """
    presence = compute_presence(snapshot, memory)
    draft = PoolDraft(snapshot, presence.usable_workers)
    evict_lost(draft, presence)
    infeasible_since, failed = find_infeasible_jobs(
        snapshot, presence.expected_workers, memory.infeasible_since
    )
    for failure in failed:
        draft.add_decision(failure)
    usable = presence.usable_workers
    usable_by_market = count_markets(usable)
    jobs = [
        replace(
            job,
            requirements=limit_to_markets(
                drop_infeasible_sharing(drop_infeasible_degrees(job.requirements, usable), usable),
                usable,
                snapshot.settings,
                usable_by_market,
            ),
        )
        for job in (
            limit_preemptible(draft, one, memory.seeding.get(one.id))
            for one in order_runnable_jobs(snapshot.jobs, failed)
        )
    ]
    remove_instances_of_finished_jobs(draft, jobs)
    expert_choices = {
        job.id: choose_expert_split(draft, job, memory.expert_splits.get(job.id)) for job in jobs
    }
    jobs = [
        apply_mode(draft, job, memory.split_states.get(job.id))
        for job, _ in expert_choices.values()
    ]
    role_moves.finish_moves(draft)
    service_hosts = ServiceHosts(snapshot, presence)
    requested = answer_sharing_requests(draft, jobs, memory.requested_partners)
    division = _divide_pool(draft, jobs, presence, service_hosts, requested)
    _place_instances(draft, jobs, division, presence, requested)
    cordoned = answer_requests(draft, jobs, division, presence, service_hosts, memory.cordoned)
    previous_states = {job.id: memory.split_states.get(job.id, SplitState()) for job in jobs}
    running = [job for job in jobs if job.id in division.workers]
    simulation_budget = SimulationBudget(snapshot.now_ms)
    split_states = {
        job.id: balance_job(
            draft, job, previous_states[job.id], memory.correction, simulation_budget
        )
        for job in sorted(running, key=lambda job: previous_states[job.id].simulated_ms)
    }
    seeding = {
        job.id: state
        for job in jobs
        if (state := update_seeding(draft, job, memory.seeding.get(job.id))) is not None
    }
    role_moves.abandon_moves(draft)
    draft.dissolve_empty_gangs()
    place_services(draft, jobs, division, presence, service_hosts)
    known_workers = {worker.id for worker in snapshot.workers}
    return draft.decisions, PlannerMemory(
        missing_since=presence.missing_since,
        lost_workers=presence.lost_workers,
        away_since=presence.away_since,
        lost_hosts=presence.lost_hosts,
        infeasible_since=infeasible_since,
        cordoned=cordoned & known_workers,
        split_states=split_states,
        entitled=dict(division.workers),
        seeding=seeding,
        requested_partners=requested,
        expert_splits={
            job_id: expert_state
            for job_id, (_, expert_state) in expert_choices.items()
            if expert_state is not None
        },
        correction=update_correction(
            memory.correction, draft, jobs, memory.split_states, split_states
        ),
        scaling=plan_scaling(
            draft,
            {job.id: job.requirements.markets.most_preemptible for job in jobs},
            memory.scaling,
        ),
    )


def _divide_pool(
    draft: PoolDraft,
    jobs: Sequence[PlannedJob],
    presence: PoolPresence,
    service_hosts: ServiceHosts,
    requested_partners: Mapping[str, str],
) -> PoolDivision:
    """Divide the pool among the jobs whose shards and sandboxes some host accepts.

    Other jobs are rejected with the reason. While a new mesh gathers workers, no time slicing
    begins, as workers may still join. Jobs for which no workers are left share the gang of another
    job, if they fit. Jobs that share a gang stay together if a job would be paused otherwise.
    """
    snapshot = draft.snapshot
    rejected = {job.id: why for job in jobs if (why := service_hosts.explain_rejection(job))}
    jobs = [job for job in jobs if job.id not in rejected]
    settings = snapshot.settings
    places = Counter(settings.get_gang_location(worker) for worker in presence.usable_workers)
    markets: dict[str, Counter[str]] = {}
    for worker in presence.usable_workers:
        markets.setdefault(settings.get_gang_location(worker), Counter())[worker.market] += 1
    claims = {job.id: _build_share_claim(draft, job) for job in jobs}
    time_slicing = settings.time_slicing and not snapshot.is_gathering_workers

    def divide(partners: Mapping[str, str]) -> PoolDivision:
        may_share = time_slicing or bool(partners)
        about = places, claims, may_share, settings.gang_scope, partners, markets
        division = divide_pool(jobs, *about)
        return replace(division, time_slicing=time_slicing)

    def add_partners(can_leave: bool) -> PoolDivision:
        partners = dict(requested)
        if settings.time_slicing:
            partners = find_present_partners(draft, jobs, requested, can_leave)
        division = divide(partners)
        if time_slicing and settings.jobs_per_gang > 1:
            for _ in jobs:
                more = find_partners(draft, jobs, division)
                if more.keys() <= partners.keys():
                    break
                partners |= more
                division = divide(partners)
        return division

    requested = select_requested_partners(draft, jobs, requested_partners) if time_slicing else {}
    division = add_partners(can_leave=time_slicing)
    if time_slicing and (paused := _count_paused(draft, division)):
        together = add_partners(can_leave=False)
        if _count_paused(draft, together) < paused:
            division = together
    division.rejected.update(rejected)
    return division


def _count_paused(draft: PoolDraft, division: PoolDivision) -> int:
    """Count the jobs that compute and get no workers."""
    cores = (draft.get_instances(job).core for job in division.rejected)
    return sum(core is not None and core.is_awake for core in cores)


def _build_share_claim(draft: PoolDraft, job: PlannedJob) -> ShareClaim:
    """Return the place of a job's core and the workers that its share must include."""
    instances = draft.get_instances(job.id)
    core_place = draft.get_place(instances.core.workers[0]) if instances.core is not None else ""
    pinned_engine_workers = sum(
        len(placement.workers) for placement in instances.engines if placement.instance.pinned
    )
    pinned_hybrids = sum(placement.instance.pinned for placement in instances.hybrids)
    if not pinned_engine_workers and pinned_hybrids and job.requirements.needs_rollout:
        pinned_engine_workers = job.requirements.smallest_engine
    is_core_settled = (
        instances.core is not None
        and instances.core.is_awake
        and instances.core.instance.is_reconciled
    )
    is_stranded = is_core_settled and job.has_checkpoint and has_no_engine_place(draft, job)
    return ShareClaim(core_place, pinned_engine_workers + pinned_hybrids, is_stranded)


def _place_instances(
    draft: PoolDraft,
    jobs: Sequence[PlannedJob],
    division: PoolDivision,
    presence: PoolPresence,
    requested_partners: Mapping[str, str],
) -> None:
    """Change the draft's instances to match the shares.

    Jobs without a share free their accelerators. Of the others, all shrink before any places its
    minimum, and all place their minimum before any grows.
    """
    for job in jobs:
        if job.id not in division.workers:
            pausing.update_block_reason(draft, job, division)
            pausing.free_accelerators(draft, job)
    running = [(job, division.workers[job.id]) for job in jobs if job.id in division.workers]
    running.sort(key=lambda one: one[0].id in division.partners)  # stable: partners before guests
    for job, _ in running:
        evict_displaced(draft, job, presence, division)
    evict_misplaced_cores(draft, jobs, division)
    waking_workers = pausing.find_waking_workers(draft, [job for job, _ in running])
    for job, share in running:
        release_untaken(draft, job)
        release_surplus(draft, job)
        shrink_to_share(draft, job, share, "share", waking_workers)
    for job, share in running:
        pausing.wake_core(draft, job, share, division)
        requested = division.partners.get(job.id, "-") == requested_partners.get(job.id)
        if not place_beside_partners(draft, job, share, division, requested):
            place_core(draft, job, share, division.core_places.get(job.id, ""))
        place_floor(draft, job, share, division.time_slicing)
        pausing.update_block_reason(draft, job, division)
    for job, share in running:
        grow_job(draft, job, share)
        end_time_slicing(draft, job, share)
    end_sharing(draft, [job for job, _ in running])
