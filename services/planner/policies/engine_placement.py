"""Placement of a job's engines: gangs of workers of one host, as many as their degree of tensor
parallelism.

By default engines have the smallest degree whose shard of the parameters fits on a worker.
`reshape_engines` changes them to desired degrees with as few changes as possible. An engine with a
desired degree stays; others are merged and split. A serving engine stays until another one serves,
if workers allow that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale
from meshrl.common.state.pool.scheduling.snapshot import Move
from meshrl.common.state.pool.store.documents import id_sort_key
from meshrl.common.state.pool.workers.rows import Role
from meshrl.services.planner.policies.market_limits import explain_not_taken, list_engine_markets
from meshrl.services.planner.policies.role_moves import make_reversible_move
from meshrl.services.planner.policies.worker_gathering import (
    IMMOVABLE_COST,
    GatheredWorkers,
    can_host_engine,
    can_host_hybrid,
    find_idle_workers,
    gather_workers,
)
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement

HYBRID_COST, PINNED_COST, OTHER_JOB_COST = (
    2,
    5,
    6,
)  # costs of instances that leave for a job's only engine
SURPLUS_COST, SPARE_HYBRID_COST = (
    1,
    2,
)  # and for a reshape: an engine of another degree, a surplus hybrid


def add_engines(draft: PoolDraft, job: PlannedJob, max_workers: int, rationale: Rationale) -> int:
    """Add engines on idle workers, at most `max_workers` in total; return their number of
    workers.
    """
    used_workers = 0
    for degree in job.requirements.tensor_parallel:
        if degree == 1:
            while used_workers < max_workers and (worker := _find_idle_worker(draft, job)):
                draft.place_instance([worker], job.id, Role.ROLLOUT, rationale)
                used_workers += 1
            continue
        if max_workers - used_workers < degree:
            break
        for there in find_idle_workers(draft, job, degree).values():
            for start in range(0, len(there) - degree + 1, degree):
                chosen = there[start : start + degree]
                is_taken = not explain_not_taken(draft, job, chosen)
                if is_taken and max_workers - used_workers >= degree:
                    draft.place_instance(chosen, job.id, Role.ROLLOUT, rationale)
                    used_workers += degree
    return used_workers


def place_only_engine(
    draft: PoolDraft,
    job: PlannedJob,
    max_workers: int,
    rationale: Rationale,
    repair_rationale: Rationale,
) -> None:
    """Place a job's only engine on at most `max_workers`. Use idle workers, or workers that hybrids
    and smaller engines of other jobs leave.
    """
    for degree in job.requirements.tensor_parallel:
        if degree > max_workers:
            return
        found = _find_only_engine_workers(draft, job, degree)
        if found is not None:
            place_engine(draft, job, found, repair_rationale if found.evicted else rationale)
            return


def has_no_engine_place(draft: PoolDraft, job: PlannedJob) -> bool:
    """Return True if a job lacks an engine of several workers, and no host can be cleared for
    it.
    """
    lacks = (
        job.requirements.needs_rollout
        and job.requirements.smallest_engine > 1
        and not draft.get_instances(job.id).engines
    )
    return lacks and _find_only_engine_workers(draft, job, job.requirements.smallest_engine) is None


def reshape_engines(
    draft: PoolDraft,
    job: PlannedJob,
    desired_degrees: Sequence[int],
    *,
    hybrids: int | None = None,
    rationale: Rationale | None = None,
    details: Mapping[str, Any] | None = None,
) -> bool:
    """Change the job's engines to the desired degrees, and its number of hybrids (None: unchanged).
    Return True if all is as desired; otherwise call it again in a later pass.

    Degrees that the job does not allow are left out, and at least one engine remains. Pinned
    engines stay, and count if they have a desired degree. Workers come from engines of other
    degrees, surplus hybrids, and idle workers; the caller checks the job's share. Each engine or
    hybrid that this creates is a move with `details`.
    """
    rationale = rationale or Rationale("shape", job.id, {"degrees": list(desired_degrees)})
    allowed = draft.requirements_by_job[job.id].tensor_parallel
    degrees = sorted((d for d in desired_degrees if d in allowed), reverse=True) or [
        job.requirements.smallest_engine
    ]
    matched, surplus, lacking = _match_engines(draft.get_instances(job.id).engines, degrees)
    there = draft.get_instances(job.id).hybrids  # of the removable ones the last first
    over = 0 if hybrids is None else max(0, len(there) - hybrids)
    spare = [one for one in reversed(there) if not one.instance.pinned][:over]
    serving_engine = _choose_serving_engine(draft, job, matched, surplus, spare, lacking)
    if serving_engine is not None:
        surplus.remove(serving_engine)
    unmet = False
    for degree in lacking:
        found = _find_workers(draft, job, degree, surplus, spare)
        if found is None:
            unmet = True
        else:
            place_engine(
                draft, job, found, rationale, {**(details or {}), "to": f"rollout of {degree}"}
            )
    if not unmet:
        here = draft.placements_by_job.get(job.id, {})
        for seated in [one for one in (*surplus, *spare) if one.instance.id in here]:
            draft.remove_instance(seated, rationale)
    if unmet or serving_engine is not None:
        return False
    if hybrids is None:
        return True
    move_details = {"policy": rationale.rule, **(details or {}), "to": Role.TRAINING}
    while len(draft.get_instances(job.id).hybrids) < hybrids:  # on idle workers
        worker = draft.find_free_worker(
            lambda w: can_host_hybrid(draft, job, w), list_engine_markets(draft, job)
        )
        if not worker:
            return False
        move_factory = make_reversible_move(draft, job.id, Role.ROLLOUT, move_details)
        draft.place_instance([worker], job.id, Role.TRAINING, rationale, move=move_factory)
    return len(draft.get_instances(job.id).hybrids) == hybrids


def _match_engines(
    engines: Sequence[InstancePlacement], degrees: Sequence[int]
) -> tuple[list[InstancePlacement], list[InstancePlacement], list[int]]:
    """Match engines with degrees. Return the engines that stay, the surplus engines, and the
    degrees without an engine.
    """
    matched: list[InstancePlacement] = []
    surplus: list[InstancePlacement] = []
    unmatched_degrees = Counter(degrees)
    order = sorted(engines, key=lambda e: (not e.instance.pinned, not e.instance.is_reconciled))
    for engine in order:
        degree = len(engine.workers)
        fits = unmatched_degrees[degree] > 0
        unmatched_degrees[degree] -= int(fits)
        (matched if fits or engine.instance.pinned else surplus).append(engine)
    return matched, surplus, sorted(unmatched_degrees.elements(), reverse=True)


def _choose_serving_engine(
    draft: PoolDraft,
    job: PlannedJob,
    matching: Sequence[InstancePlacement],
    surplus_engines: Sequence[InstancePlacement],
    spare_hybrids: Sequence[InstancePlacement],
    missing_degrees: Sequence[int],
) -> InstancePlacement | None:
    """Choose the surplus engine that stays until another one serves. It is the smallest whose
    workers are not needed for a missing engine. Return None if none need stay, or none can.
    """
    serving = sorted(
        (e for e in surplus_engines if e.instance.is_reconciled), key=lambda e: len(e.workers)
    )
    if not serving or any(engine.instance.is_reconciled for engine in matching):
        return None
    if matching:
        return serving[0]
    for engine in serving:
        others = [one for one in surplus_engines if one is not engine]
        if any(
            _find_workers(draft, job, degree, others, spare_hybrids) for degree in missing_degrees
        ):
            return engine
    return None


def _find_workers(
    draft: PoolDraft,
    job: PlannedJob,
    degree: int,
    surplus_engines: Sequence[InstancePlacement],
    spare_hybrids: Sequence[InstancePlacement],
) -> GatheredWorkers | None:
    if degree == 1 and (worker := _find_idle_worker(draft, job)):
        return GatheredWorkers((worker,))
    costs = {one.instance.id: SURPLUS_COST for one in surplus_engines}
    costs |= {one.instance.id: SPARE_HYBRID_COST for one in spare_hybrids}
    return gather_workers(
        draft, job, degree, lambda one: costs.get(one.instance.id, IMMOVABLE_COST)
    )


def _find_only_engine_workers(
    draft: PoolDraft, job: PlannedJob, degree: int
) -> GatheredWorkers | None:
    """Find workers for a job's only engine. Engines of the same or a larger degree stay; otherwise
    two jobs would take each other's workers forever.
    """
    if degree == 1:
        if worker := _find_idle_worker(draft, job):
            return GatheredWorkers((worker,))
        helper = next(iter(draft.get_instances(job.id).hybrids), None)
        return GatheredWorkers(helper.workers, (helper,)) if helper is not None else None

    def cost(seated: InstancePlacement) -> int:
        resident = seated.instance
        if resident.core or resident.time_sliced or resident.role == Role.SCORING:
            return IMMOVABLE_COST
        if resident.job == job.id:
            return PINNED_COST if resident.pinned else HYBRID_COST
        return (
            IMMOVABLE_COST if len(seated.workers) >= degree or resident.pinned else OTHER_JOB_COST
        )

    return gather_workers(draft, job, degree, cost)


def _find_idle_worker(draft: PoolDraft, job: PlannedJob) -> str:
    """Return an idle worker for an engine of one worker; empty without one."""
    return draft.find_free_worker(
        lambda worker: can_host_engine(draft, job, worker, 1),
        list_engine_markets(draft, job),
    )


def find_engine_around(draft: PoolDraft, job: PlannedJob, worker: str) -> GatheredWorkers | None:
    """Find workers for an engine of the smallest degree that includes `worker`, whose instances
    leave. Use idle workers of its host and workers of the job's hybrids. Return None if there
    are too few.
    """
    degree, host = job.requirements.smallest_engine, draft.workers[worker].host
    there = {
        one.instance.id: one
        for one in (
            *draft.placements_by_worker[worker].values(),
            *draft.list_gang_neighbours(worker),
        )
    }
    if any(one.instance.core or not one.is_awake for one in there.values()):
        return None
    helpers = [one for one in draft.get_instances(job.id).hybrids if not one.instance.pinned]
    near = [w for w in find_idle_workers(draft, job, degree).get(host, []) if w != worker]
    lending = {
        one.workers[0]: one
        for one in helpers
        if draft.workers[one.workers[0]].host == host and one.instance.id not in there
    }
    others = [*near, *lending][: degree - 1]
    if len(others) < degree - 1 or not can_host_engine(draft, job, worker, degree):
        return None
    leave = [*there.values(), *(lending[name] for name in others if name in lending)]
    return GatheredWorkers(tuple(sorted([worker, *others], key=id_sort_key)), tuple(leave))


def place_engine(
    draft: PoolDraft,
    job: PlannedJob,
    gathered: GatheredWorkers,
    rationale: Rationale,
    details: dict[str, Any] | None = None,
    *,
    pinned: bool = False,
    op: str = "",
) -> None:
    """Place an engine on gathered workers, whose instances leave; with `details` it is a move."""
    own = [one for one in gathered.evicted if one.instance.job == job.id]
    for seated in gathered.evicted:
        draft.remove_instance(seated, rationale)
    move_factory = (
        _make_engine_move(draft, job, gathered, own, rationale, details)
        if details is not None
        else None
    )
    draft.place_instance(
        gathered.workers, job.id, Role.ROLLOUT, rationale, pinned=pinned, move=move_factory, op=op
    )


def _make_engine_move(
    draft: PoolDraft,
    job: PlannedJob,
    gathered: GatheredWorkers,
    own_placements: Sequence[InstancePlacement],
    rationale: Rationale,
    details: dict[str, Any],
) -> Callable[[str, str], Move]:
    """Return a function that makes the move of an engine. If all former instances were the job's,
    undoing the move restores them.
    """
    named = Counter(f"{one.instance.role} of {len(one.workers)}" for one in own_placements)
    previous_use = ", ".join(f"{n} {name}" for name, n in sorted(named.items())) or str(Role.IDLE)
    move_details = {"policy": rationale.rule, "from": previous_use, **details}
    inside = [one for one in own_placements if set(one.workers) <= set(gathered.workers)]
    ids = [one.instance.id for one in own_placements]
    degrees = [len(one.workers) for one in inside]
    covers_all_workers = sum(degrees) == len(gathered.workers)
    roles = {one.instance.role for one in inside}
    if covers_all_workers and roles == {Role.TRAINING}:
        return make_reversible_move(
            draft, job.id, Role.TRAINING, move_details, removed_instances=ids
        )
    if not covers_all_workers or roles != {Role.ROLLOUT}:
        degrees = [len(gathered.workers)]
    return make_reversible_move(
        draft, job.id, Role.ROLLOUT, move_details, degrees, removed_instances=ids
    )
