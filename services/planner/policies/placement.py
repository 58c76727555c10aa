"""Placement of a job's roles on the workers of its share: shrinking, floor, repairs and growth.

A core takes a worker for each of its ranks, an engine as many as its degree
(`engine_placement.py`), all of one host; every other role takes one worker. Where workers are few,
engines and frozen models take time slices of the core's workers.
"""

from __future__ import annotations

from collections.abc import Set

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale
from meshrl.common.state.pool.scheduling.feasibility import list_slice_bytes
from meshrl.common.state.pool.workers.rows import Role
from meshrl.services.planner.policies import engine_placement
from meshrl.services.planner.policies.hybrid_transfers import can_add_hybrids
from meshrl.services.planner.policies.market_limits import explain_not_taken, list_engine_markets
from meshrl.services.planner.policies.worker_gathering import can_host_hybrid
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import JobInstances
from meshrl.services.planner.pool.residency import explain_no_slice_room


def shrink_to_share(
    draft: PoolDraft, job: PlannedJob, share: int, rule: str, waking_workers: Set[str]
) -> None:
    """Remove a job's instances beyond its share: hybrids first, then its last engines except one.
    Instances on workers where a core wakes go first, as they would lose the worker anyway. Pinned
    instances go last. Frozen models leave after these, if they can share a worker of the core.
    """
    why = _make_rationale(rule, job, share)
    team = draft.get_instances(job.id)
    there = sorted(team.engines, key=lambda engine: not waking_workers.isdisjoint(engine.workers))
    most = share - _count_fixed_workers(job, share)
    stays = next((engine for engine in there if len(engine.workers) <= most), None)
    others = [engine for engine in there if engine is not stays]
    spare = [*reversed(team.hybrids), *reversed(others)]
    spare.sort(key=lambda s: (s.instance.pinned, waking_workers.isdisjoint(s.workers)))  # stable
    over = team.awake_worker_count - share
    if team.scoring is not None and not _has_own_scoring_worker(job, share):
        spare += [] if team.scoring.instance.time_sliced else [team.scoring]
    for seated in spare:
        if over > 0:
            draft.remove_instance(seated, why)
            over -= len(seated.workers)


def place_floor(draft: PoolDraft, job: PlannedJob, share: int, time_slicing: bool) -> None:
    """Place one engine and the frozen models: with the core, the minimum of a job."""
    _place_scoring(draft, job, share, time_slicing)
    if not job.requirements.needs_rollout:
        return
    if job.requirements.is_colocated:
        if time_slicing:
            start_time_slicing(draft, job, _make_rationale("turns", job, share))
    elif share - _count_fixed_workers(job, share) >= job.requirements.smallest_engine:
        if not draft.get_instances(job.id).engines:
            why, repair = (
                _make_rationale("default", job, share),
                _make_rationale("repair", job, share),
            )
            engine_placement.place_only_engine(
                draft, job, share - _count_fixed_workers(job, share), why, repair
            )
    elif (
        time_slicing and job.requirements.can_time_slice and not draft.get_instances(job.id).engines
    ):
        start_time_slicing(draft, job, _make_rationale("turns", job, share))


def grow_job(draft: PoolDraft, job: PlannedJob, share: int) -> None:
    """Place hybrids on idle workers up to the job file's number, then engines. Workers that are too
    few for an engine become hybrids, once a new mesh is complete. Frozen models leave the core
    first.
    """
    team = draft.get_instances(job.id)
    if team.core is None or not team.core.is_awake:
        return
    _separate_scoring(draft, job, share)
    _replace_disallowed_engines(draft, job, share)
    why = _make_rationale("default", job, share)
    missing_hybrids = job.config.training - 1 - len(team.hybrids) if can_add_hybrids(job) else 0
    if (
        _add_hybrids(
            draft,
            job,
            min(missing_hybrids, share - draft.get_instances(job.id).awake_worker_count),
            why,
        )
        < missing_hybrids
    ):
        return
    remaining_workers = share - draft.get_instances(job.id).awake_worker_count
    remaining_workers -= engine_placement.add_engines(draft, job, remaining_workers, why)
    if job.requirements.smallest_engine > 1 and not draft.snapshot.is_gathering_workers:
        _add_hybrids(draft, job, remaining_workers, why)


def _add_hybrids(draft: PoolDraft, job: PlannedJob, max_hybrids: int, rationale: Rationale) -> int:
    """Place at most `max_hybrids` hybrids on idle workers. Return their number, or `max_hybrids` if
    it is not positive.
    """
    if not can_add_hybrids(job) or max_hybrids <= 0:
        return max_hybrids
    for found in range(max_hybrids):
        worker = draft.find_free_worker(
            lambda w: can_host_hybrid(draft, job, w), list_engine_markets(draft, job)
        )
        if not worker:
            return found
        draft.place_instance([worker], job.id, Role.TRAINING, rationale)
    return max_hybrids


def _replace_disallowed_engines(draft: PoolDraft, job: PlannedJob, share: int) -> None:
    """Replace engines of degrees that the job no longer allows."""
    team, allowed = draft.get_instances(job.id), draft.requirements_by_job[job.id].tensor_parallel
    current_degrees = [len(engine.workers) for engine in team.engines if not engine.instance.pinned]
    if set(current_degrees) <= set(allowed):
        return
    allowed_degrees = [degree for degree in current_degrees if degree in allowed]
    room = share - _count_fixed_workers(job, share) - len(team.hybrids) - sum(allowed_degrees)
    desired_degrees = allowed_degrees + [job.requirements.smallest_engine] * (
        room // job.requirements.smallest_engine
    )
    engine_placement.reshape_engines(
        draft, job, desired_degrees, rationale=_make_rationale("default", job, share)
    )


def end_time_slicing(draft: PoolDraft, job: PlannedJob, share: int) -> None:
    """Remove time-sliced engines when an engine with its own worker is ready."""
    team = draft.get_instances(job.id)
    ready = any(engine.instance.is_reconciled for engine in team.engines)
    if (
        team.core is None
        or not ready
        or job.requirements.is_colocated
        or share - _count_fixed_workers(job, share) < job.requirements.smallest_engine
    ):
        return
    why = Rationale("share", job.id, {"entitled": share})
    for engine in team.time_sliced_engines:
        draft.remove_instance(engine, why)


def _count_fixed_workers(job: PlannedJob, share: int) -> int:
    """Return the number of workers of the core and, if they have their own, the frozen models."""
    return job.requirements.ranks + int(_has_own_scoring_worker(job, share))


def _has_own_scoring_worker(job: PlannedJob, share: int) -> bool:
    """Return True if frozen models have a worker of their own in such a share."""
    needs = job.requirements
    return needs.needs_scoring and (not needs.can_share_scoring or share > needs.time_sliced_floor)


def _make_rationale(rule: str, job: PlannedJob, share: int) -> Rationale:
    return Rationale(rule, job.id, {"entitled": share})


def _place_scoring(draft: PoolDraft, job: PlannedJob, share: int, time_slicing: bool) -> None:
    """Place the frozen models on an idle worker, or on the worker whose work costs least to stop.

    Without either, and if the share is too small, they take time slices of a worker of the core.
    """
    team = draft.get_instances(job.id)
    scoring, core = team.scoring, team.core
    is_shared = scoring is not None and scoring.instance.time_sliced
    if scoring and core and is_shared and not set(scoring.workers) <= set(core.workers):
        draft.remove_instance(scoring, _make_rationale("repair", job, share))
        scoring = None
    if not job.requirements.needs_scoring or scoring is not None:
        return
    can_share = time_slicing and job.requirements.can_share_scoring
    why, worker = _make_rationale("default", job, share), ""
    is_alone = not can_share or _has_own_scoring_worker(job, share)
    if is_alone:
        worker = _find_scoring_worker(draft, job)
    if is_alone and not worker:
        movable = [e for e in team.engines if not e.instance.pinned]
        spares = [h for h in team.hybrids if not h.instance.pinned]
        spares = spares or (movable if len(team.engines) > 1 else [])
        if spares:
            why = _make_rationale("repair", job, share)
            draft.remove_instance(spares[-1], why)
            worker = spares[-1].workers[0]
    if worker:
        draft.place_instance([worker], job.id, Role.SCORING, why)
    elif can_share:
        _place_scoring_beside_core(draft, job, _make_rationale("turns", job, share))


def _find_scoring_worker(draft: PoolDraft, job: PlannedJob) -> str:
    return draft.find_free_worker(
        lambda w: not explain_not_taken(draft, job, [w]), list_engine_markets(draft, job)
    )


def _place_scoring_beside_core(draft: PoolDraft, job: PlannedJob, rationale: Rationale) -> None:
    """Place the frozen models on the worker of the core with the fewest instances that has room."""
    core = draft.get_instances(job.id).core
    if core is None or not core.is_awake:
        return
    fitting = [worker for worker in core.workers if not _explain_no_scoring_on(draft, job, worker)]
    if not fitting:
        return
    worker = min(fitting, key=lambda worker: len(draft.list_awake_on(worker)))
    if not core.instance.time_sliced:
        draft.update_instance(core, rationale, time_sliced=True)
    draft.place_instance([worker], job.id, Role.SCORING, rationale, time_sliced=True)


def _separate_scoring(draft: PoolDraft, job: PlannedJob, share: int) -> None:
    """Move frozen models that share a worker of the core to an idle worker of the share."""
    team = draft.get_instances(job.id)
    if team.scoring is None or not team.scoring.instance.time_sliced:
        return
    if share > team.awake_worker_count and (worker := _find_scoring_worker(draft, job)):
        why = Rationale("share", job.id, {"entitled": share})
        draft.remove_instance(team.scoring, why)
        draft.place_instance([worker], job.id, Role.SCORING, why)


def explain_no_scoring_room(draft: PoolDraft, job: PlannedJob) -> str:
    """Return why the frozen models fit on no worker of the core; empty if they fit or there is no
    core.
    """
    core = draft.get_instances(job.id).core
    reasons = [
        _explain_no_scoring_on(draft, job, worker) for worker in (core.workers if core else ())
    ]
    return "" if "" in reasons else next(iter(reasons), "")


def _explain_no_scoring_on(draft: PoolDraft, job: PlannedJob, worker: str) -> str:
    needs = {job.id: list_slice_bytes(job.requirements, with_scoring=True)}
    return explain_no_slice_room(draft, worker, needs)


def start_time_slicing(draft: PoolDraft, job: PlannedJob, rationale: Rationale) -> None:
    """Place an engine on each worker of the core that has none, time-sliced with it."""
    team = draft.get_instances(job.id)
    core = team.core
    if core is None or not core.is_awake:
        return
    lacking = _list_workers_without_engine(team)
    if explain_no_engine_room(draft, job):
        return
    if lacking and not core.instance.time_sliced:
        draft.update_instance(core, rationale, time_sliced=True)
    for worker in lacking:
        draft.place_instance([worker], job.id, Role.ROLLOUT, rationale, time_sliced=True)


def explain_no_engine_room(draft: PoolDraft, job: PlannedJob) -> str:
    """Return why no engines fit beside the job's core; empty if they fit or there is no core."""
    team = draft.get_instances(job.id)
    shared = team.scoring.workers if team.scoring is not None else ()
    for worker in _list_workers_without_engine(team):
        needs = list_slice_bytes(job.requirements, with_scoring=worker in shared)
        if why := explain_no_slice_room(draft, worker, {job.id: needs}):
            return why
    return ""


def _list_workers_without_engine(team: JobInstances) -> list[str]:
    there = {worker for engine in team.time_sliced_engines for worker in engine.workers}
    workers = team.core.workers if team.core is not None else ()
    return [worker for worker in workers if worker not in there]
