"""Placement of a job's core: its workers, gathered on as few hosts as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from meshrl.common.hardware.accelerators import load_accelerators, match_kind
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale
from meshrl.common.state.pool.scheduling.feasibility import estimate_accelerator_bytes, has_room
from meshrl.common.state.pool.store.documents import id_sort_key
from meshrl.common.state.pool.workers.rows import Role, Tier
from meshrl.services.planner.policies.market_limits import explain_not_taken, rank_for_core
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement, JobInstances

UNAVAILABLE_COST = 100  # cost of a worker that is not available
UNSAVED_CORE_COST = UNAVAILABLE_COST // 2  # of a worker whose gang has steps in no checkpoint
IDLE_COST_LIMIT = 2  # above the cost of a worker without an awake instance
COST_LIMITS = (
    UNSAVED_CORE_COST,
    UNAVAILABLE_COST,
)  # upper limits of costs, tried one after the other

WorkerOffer = tuple[int, tuple[int, str]]  # the cost of a worker, and its id as a sort key


def place_core(draft: PoolDraft, job: PlannedJob, share_workers: int, core_place: str) -> None:
    """Place the core of a job without one. Prefer workers of hybrids, which have the model, or
    workers whose work costs least to stop.
    """
    if draft.get_instances(job.id).core is not None:
        return
    workers = _choose_core_workers(draft, job, core_place)
    if not workers:
        return
    snapshot = draft.snapshot
    had = any(r.job == job.id for gang in snapshot.gangs for r in gang.instances)
    rule = "repair" if had or job.steps_done else "default"
    why = Rationale(rule, job.id, {"entitled": share_workers})
    # A sleeping instance on a single worker stays; a gang that is replaced loses all instances.
    leave = {
        s.instance.id: s for worker in workers for s in draft.placements_by_worker[worker].values()
    }
    if len(workers) == 1:
        leave = {name: seated for name, seated in leave.items() if seated.is_awake}
    elif len({draft.gang_by_worker.get(worker, "") for worker in workers}) > 1:
        leave |= {
            s.instance.id: s for worker in workers for s in draft.list_gang_neighbours(worker)
        }
    for seated in leave.values():
        draft.remove_instance(seated, why)
    draft.place_instance(
        workers, job.id, Role.TRAINING, why, core=True, expert_split=job.requirements.expert_split
    )


def _choose_core_workers(draft: PoolDraft, job: PlannedJob, core_place: str) -> list[str]:
    """Choose the workers of a new core, in rank order; none while they are not available."""
    ranks = job.requirements.ranks
    own = draft.get_instances(job.id)
    if ranks > 1:
        candidates = [w for w in draft.placeable_workers if draft.get_place(w) == core_place]
        split_workers = [
            w
            for w in candidates
            if match_kind(draft.workers[w].accelerator) in job.requirements.expert_split_kinds
        ]
        if len(split_workers) >= ranks:  # of the kinds for the expert split
            candidates = split_workers
    else:
        own_workers = [
            w for seated in own.placements for w in seated.workers if w in draft.placeable_workers
        ]
        candidates = [
            *own_workers,
            *filter(None, [draft.find_free_worker(lambda w: _can_host_core(draft, job, w))]),
        ]
        # where an engine, or a core of several ranks, reserves the workers of a place
        needs = draft.requirements_by_job.values()
        if any(need.smallest_engine > 1 or need.ranks > 1 for need in needs):
            at_home = draft.find_free_worker(
                lambda w: draft.get_place(w) == core_place and _can_host_core(draft, job, w)
            )
            own_at_home = [
                worker for worker in own_workers if draft.get_place(worker) == core_place
            ]
            candidates = [*own_at_home, *filter(None, [at_home])] or candidates
    offers: dict[str, list[WorkerOffer]] = {}
    for worker in set(candidates):
        host = draft.workers[worker].host if ranks > 1 else ""
        offers.setdefault(host, []).append(
            (_compute_worker_cost(draft, job, own, worker), id_sort_key(worker))
        )
    if job.requirements.attention_ranks:
        known = load_accelerators()
        kinds = {worker: match_kind(draft.workers[worker].accelerator) for worker in candidates}
        speeds = {w: known[kind].flops if kind in known else 0.0 for w, kind in kinds.items()}
        looks = (
            choose_two_kinds(offers, speeds, job.requirements.attention_ranks, ranks, m)
            for m in (IDLE_COST_LIMIT, *COST_LIMITS)
        )
    else:
        looks = (choose_fewest_hosts(offers, ranks, most) for most in COST_LIMITS)
    chosen = next(filter(None, looks), [])
    return [] if explain_not_taken(draft, job, chosen) else chosen


def choose_two_kinds(
    offers: Mapping[str, Sequence[WorkerOffer]],
    speeds: Mapping[str, float],
    attention_ranks: int,
    ranks: int,
    cost_limit: int,
) -> list[str]:
    """Choose workers of two kinds, as `choose_fewest_hosts` does. The first `attention_ranks` of
    `ranks` get the fastest kind with enough workers, the others the slowest. Without two
    sufficient kinds choose from all, fastest first.
    """

    def select_by_speed(speed: float) -> dict[str, list[WorkerOffer]]:
        return {
            host: [offer for offer in some if speeds[offer[1][1]] == speed]
            for host, some in offers.items()
        }

    rising = sorted(set(speeds.values()))
    for fast, slow in product(reversed(rising), rising):
        if fast <= slow:
            continue
        first = choose_fewest_hosts(select_by_speed(fast), attention_ranks, cost_limit)
        rest = choose_fewest_hosts(select_by_speed(slow), ranks - attention_ranks, cost_limit)
        if first and rest:
            return first + rest
    chosen = choose_fewest_hosts(offers, ranks, cost_limit)
    return sorted(chosen, key=lambda worker: -speeds[worker])


def choose_fewest_hosts(
    offers: Mapping[str, Sequence[WorkerOffer]], ranks: int, cost_limit: int
) -> list[str]:
    """Choose `ranks` workers below `cost_limit`, of the fewest and then the cheapest hosts. They
    are in rank order, with those of a host adjacent. Return an empty list if there are too few.
    """
    fit = {
        host: sorted(one for one in some if one[0] < cost_limit) for host, some in offers.items()
    }
    remaining_offers = {host: some for host, some in fit.items() if some}
    if sum(map(len, remaining_offers.values())) < ranks:
        return []
    chosen: list[list[tuple[int, str]]] = []

    def order(host: str) -> tuple[int, int, WorkerOffer]:
        some, cost = remaining_offers[host], sum(cost for cost, _ in remaining_offers[host][:ranks])
        return (cost, len(some), some[0]) if sufficient_hosts else (-len(some), cost, some[0])

    while ranks:  # the largest first, until one host has all remaining ranks
        sufficient_hosts = [host for host, some in remaining_offers.items() if len(some) >= ranks]
        host = min(sufficient_hosts or remaining_offers, key=order)
        host_offers = remaining_offers.pop(host)[:ranks]
        chosen.append(sorted(name for _, name in host_offers))
        ranks -= len(host_offers)
    return [worker for names in sorted(chosen) for _, worker in names]


def _compute_worker_cost(
    draft: PoolDraft, job: PlannedJob, own_instances: JobInstances, worker: str
) -> int:
    """Compute the cost of stopping the work of a worker."""
    if not _can_host_core(draft, job, worker):
        return UNAVAILABLE_COST
    there = list(draft.placements_by_worker[worker].values())
    cost = max(
        (_compute_removal_cost(job, own_instances, seated) for seated in there if seated.is_awake),
        default=1,
    )
    if job.requirements.ranks > 1:  # its gang may have to be dissolved
        beside = draft.list_gang_neighbours(worker)
        there += beside
        for seated in beside:
            if seated.is_awake:  # a core with a checkpoint continues in another gang
                last = seated.instance.core or seated.instance.time_sliced
                dear = last and _can_leave(draft, seated)
                cost = max(
                    cost,
                    UNSAVED_CORE_COST
                    if dear
                    else _compute_removal_cost(job, own_instances, seated),
                )
    asleep = [s for s in there if not s.is_awake]
    if any(not s.instance.is_reconciled for s in asleep):
        return UNAVAILABLE_COST
    if asleep and job.requirements.ranks > 1:
        return UNAVAILABLE_COST if any(not _can_leave(draft, s) for s in asleep) else max(cost, 8)
    return cost + 2 * bool(asleep) + rank_for_core(draft, worker)


def _can_host_core(draft: PoolDraft, job: PlannedJob, worker: str) -> bool:
    need = estimate_accelerator_bytes(Role.TRAINING, True, job.requirements.ranks, job.requirements)
    has_memory = has_room(draft.workers[worker].budget, Tier.ACCELERATOR, 0, need)
    return has_memory and not explain_not_taken(draft, job, [worker])


def _compute_removal_cost(
    job: PlannedJob, own_instances: JobInstances, placement: InstancePlacement
) -> int:
    resident = placement.instance
    if resident.core:
        return UNAVAILABLE_COST
    if resident.job != job.id:  # its job gets another worker for it
        return UNAVAILABLE_COST if job.requirements.ranks == 1 or resident.time_sliced else 6
    order = {Role.TRAINING: 0, Role.SCORING: 3}
    return order.get(resident.role, 2 if len(own_instances.engines) > 1 else 4)


def _can_leave(draft: PoolDraft, placement: InstancePlacement) -> bool:
    """Return True if an instance may leave: a checkpoint covers all of its state."""
    job = next((j for j in draft.snapshot.jobs if j.id == placement.instance.job), None)
    return job is None or job.has_checkpoint
